"""Trajectories and groups as the trainer gets them."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.engine.base import VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One try of the agent at one task, start to reward."""

    run: str
    draw: int
    task_id: str
    attempt: int
    node: int
    tokens: tuple[int, ...]
    """The whole sequence, prompt first: exactly what engines were given and sampled."""
    logprobs: tuple[float, ...]
    """One a token, from the engine at the sampling temperature; 0.0 where loss_mask is off."""
    loss_mask: tuple[bool, ...]
    """True for each token that the engine sampled."""
    versions: tuple[VersionSpan, ...]
    """Spans over `tokens`; only sampled tokens are covered."""
    reward: float | None
    cause: str
    turns: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase: queued, sandbox_start, model, command, grade, total."""
    messages: str = "{}"
    """JSON, mini-swe-agent's trajectory format 1.1."""
    patch: str = ""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"trajectory {self.draw}/{self.attempt}: {len(self.tokens)} tokens, "
                f"{len(self.logprobs)} logprobs, {len(self.loss_mask)} mask values; must be equal"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The trajectories of one draw of a task."""

    draw: int
    task_id: str
    trajectories: tuple[Trajectory, ...]
    dropped: str = ""
    """Why the group cannot be trained (all attempts lost, …); its draw is consumed as filtered."""
