"""Trajectories and groups as the trainer gets them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.engine.base import VersionSpan
from agentrl.engine.experts import NO_EXPERTS, Experts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One try of the agent at one task, start to reward.

    The token fields take any sequence and hold read-only numpy arrays, so that a group of long
    trajectories crosses the spool without a Python object a token.
    """

    run: str
    draw: int
    task_id: str
    attempt: int
    node: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The whole sequence, prompt first: exactly what engines were given and sampled."""
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """One a token, from the engine at the sampling temperature; 0.0 where loss_mask is off."""
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    """True for each token that the engine sampled."""
    experts: Experts = field(default_factory=lambda: NO_EXPERTS)
    """[tokens, layers, experts a token] that the engine took; without any, where it was not asked.
    Of each position those when the token after it was sampled; the last has those before it."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans over `tokens`; only sampled tokens are covered."""
    reward: float | None
    cause: str
    turns: int
    tries: int = 1
    """Tries that it took, the one kept here included; the others were infrastructure failures."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase: queued, sandbox_start, setup, model, command, grade, total."""
    messages: str = "{}"
    """JSON, mini-swe-agent's trajectory format 1.1."""
    patch: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        object.__setattr__(self, "logprobs", _frozen(self.logprobs, np.float32))
        object.__setattr__(self, "loss_mask", _frozen(self.loss_mask, np.bool_))
        if not len(self.tokens) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"trajectory {self.draw}/{self.attempt}: {len(self.tokens)} tokens, "
                f"{len(self.logprobs)} logprobs, {len(self.loss_mask)} mask values; must be equal"
            )
        object.__setattr__(self, "experts", _checked(self.experts, len(self.tokens)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name))
            if item.name in ("tokens", "logprobs", "loss_mask", "experts")
            else getattr(self, item.name) == getattr(other, item.name)
            for item in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The trajectories of one draw of a task."""

    draw: int
    task_id: str
    trajectories: tuple[Trajectory, ...]
    dropped: str = ""
    """Why the group cannot be trained (all attempts lost, …); its draw is consumed as filtered."""


def _frozen(values: ArrayLike, kind: type[np.generic]) -> NDArray[np.generic]:
    """Return `values` as a read-only 1-D array of `kind`; the caller's own array stays writable."""
    array = np.asarray(values, dtype=kind).reshape(-1).view()
    array.flags.writeable = False
    return array


def _checked(experts: Experts, tokens: int) -> Experts:
    """Return `experts` read-only; the caller's own array stays writable. Raises ValueError."""
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"experts are {experts.dtype} {list(experts.shape)}, must be uint8 or uint16 of 3 "
            "dimensions"
        )
    if experts.size and len(experts) != tokens:
        raise ValueError(f"experts of {len(experts)} tokens, {tokens} are there")
    view = (experts if experts.size else NO_EXPERTS).view()
    view.flags.writeable = False
    return view
