"""What the trainer asks of a back end, and what a back end's state is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from agentrl.training.packing import MicroBatch

if TYPE_CHECKING:
    from agentrl.config import TrainingConfig
    from agentrl.training.taken import Taken


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendState:
    """All that a back end needs to go on bit for bit, whole: on any number of ranks."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """`exp_avg/NAME` and so on; scalars as 0-d tensors."""
    updates: int
    """Optimizer steps taken: the learning-rate schedule is a function of it."""


def learning_rate(config: TrainingConfig, updates: int) -> float:
    """Return that of the update after `updates`: a linear rise, then `lr_decay`'s way."""
    rise = (updates + 1) / max(1, config.warmup_steps)
    left = (config.steps - updates) / max(1, config.steps - config.warmup_steps)
    fall = left if config.lr_decay == "linear" else 1.0
    return config.lr * max(0.0, min(rise, fall, 1.0))


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

    def state(self) -> BackendState: ...

    def restore(self, state: BackendState) -> None: ...
