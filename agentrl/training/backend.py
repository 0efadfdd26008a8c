"""What the trainer asks of a back end, and what a back end's state is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from agentrl.errors import CheckpointError, DivergedError
from agentrl.training.packing import MicroBatch

if TYPE_CHECKING:
    from agentrl.config import TrainingConfig
    from agentrl.training.taken import Taken


@dataclass(frozen=True, slots=True)
class Part:
    """Every size-th tensor, from number `rank` on: a rank's share of a state."""

    rank: int
    size: int

    def has(self, number: int) -> bool:
        return number % self.size == self.rank


OPTIMIZER = ("exp_avg", "exp_avg_sq", "step")
"""Kinds of Adam's state: two moments, and the updates taken."""
WHOLE, NOTHING = Part(0, 1), Part(-1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendState:
    """All that a back end needs to go on bit for bit, on any number of ranks; or a share of it."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """`exp_avg/NAME` and so on; scalars as 0-d tensors."""
    updates: int
    """Optimizer steps taken: the learning-rate schedule is a function of it."""


def check_state(state: BackendState, names: Set[str]) -> None:
    """Raise CheckpointError when a state is not of the model with these parameters."""
    check_kinds({key.partition("/")[0] for key in state.optimizer})
    wanted = {f"{kind}/{name}" for kind in OPTIMIZER for name in names}
    odd = names ^ state.model.keys()
    odd |= wanted ^ state.optimizer.keys() if state.optimizer else set()
    if odd:
        told = ", ".join(sorted(odd)[:3])
        raise CheckpointError(f"checkpoint is of another model: {told} differ")


def check_kinds(kinds: Iterable[str]) -> None:
    """Raise CheckpointError for an optimizer's state that is not Adam's, or not all of it."""
    if (found := set(kinds)) and (lost := sorted(set(OPTIMIZER) - found)):
        raise CheckpointError(
            f"checkpoint's optimizer state has no {', '.join(lost)}: a file of it is lost; take an "
            "older checkpoint"
        )
    if odd := sorted(found - set(OPTIMIZER)):
        raise CheckpointError(
            f"checkpoint's optimizer state has {', '.join(odd)}, and Adam's is "
            f"{', '.join(OPTIMIZER)}: another program wrote it; to begin from its weights alone, "
            "give its folder as model.path of a new run"
        )


def check_tensor(name: str, found: Tensor, wanted: Sequence[int]) -> None:
    """Raise CheckpointError when a checkpoint's tensor is not of the model's shape."""
    if tuple(found.shape) != tuple(wanted):
        raise CheckpointError(
            f"{name} is {list(found.shape)} in the checkpoint and {list(wanted)} in the model: "
            "the two are not of one model"
        )


def learning_rate(config: TrainingConfig, updates: int) -> float:
    """Return that of the update after `updates`: a linear rise, then `lr_decay`'s way."""
    rise = (updates + 1) / max(1, config.warmup_steps)
    left = (config.steps - updates) / max(1, config.steps - config.warmup_steps)
    fall = left if config.lr_decay == "linear" else 1.0
    return config.lr * max(0.0, min(rise, fall, 1.0))


def refuse_divergence(norm: float, *, loss: float, updates: int) -> None:
    """Raise DivergedError for a gradient that is no number; the weights are not yet changed."""
    if not math.isfinite(norm):
        raise DivergedError(
            f"update {updates + 1}: gradient norm {norm}, loss {loss}; the weights are unchanged. "
            "Resume from the last checkpoint with a lower training.lr"
        )


class Backend(Protocol):
    """One policy in training. Batches are whole steps; the back end splits work over its ranks."""

    @property
    def gaps(self) -> list[float]:
        """Mean |trainer − engine|, nats a token, of each sample of the last step."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] float32 at the sampling temperature, without gradient."""

    def train_step(
        self, batches: Sequence[MicroBatch], taken: Taken | None = None
    ) -> dict[str, float]:
        """Take one optimizer step over all of `batches`; return its metrics.

        taken: where other ranks find the same; None: they are told it all.
        """

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, in the dtype that engines load."""

    def state(self) -> BackendState:
        """Return the whole state."""

    def share(self, folder: Path) -> BackendState:
        """Return a copy of this rank's share on the CPU; the others write theirs to `folder`."""

    def restore(self, state: BackendState) -> None: ...
