"""A back end whose ranks all make the same call: rank 0 is called, the others are told.

For a back end that cuts each step itself (megatron_backend); TorchBackend tells by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.errors import DivergedError
from agentrl.training import ranks
from agentrl.training.backend import NOTHING, WHOLE, BackendState, Part
from agentrl.training.packing import MicroBatch
from agentrl.training.ranks import World
from agentrl.training.shares import ShareWriter, write_share
from agentrl.training.taken import Taken, as_tensors, reread

LOGPROBS, STEP, EXPORT, STATE, RESTORE, SHARE = 1, 2, 3, 4, 5, 6


class Together(Protocol):
    """A back end of which every rank makes each call, with the same whole step."""

    gaps: list[float]

    def logprobs(self, batch: MicroBatch) -> Tensor: ...

    def train_step(self, batches: Sequence[MicroBatch]) -> dict[str, float]: ...

    def export_hf(self) -> Iterator[tuple[str, Tensor]]: ...

    def state(self, part: Part = WHOLE) -> BackendState:
        """Return this part of the state, on the CPU; every rank takes part in gathering it."""

    def restore(self, state: BackendState | None, *, updates: int, kinds: Sequence[str]) -> None:
        """Take over rank 0's `state`; the other ranks give None."""


class Led:
    """Rank 0's end of it."""

    def __init__(self, backend: Together, world: World) -> None:
        self.backend, self.world = backend, world

    @property
    def gaps(self) -> list[float]:
        return self.backend.gaps

    def logprobs(self, batch: MicroBatch) -> Tensor:
        self.world.tell(LOGPROBS, ranks.to_tensors([[batch]]))
        return self.backend.logprobs(batch)

    def train_step(
        self, batches: Sequence[MicroBatch], taken: Taken | None = None
    ) -> dict[str, float]:
        told = ranks.to_tensors([batches]) if taken is None else as_tensors(taken, batches)
        self.world.tell(STEP, told)
        return self.backend.train_step(batches)

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        self.world.tell(EXPORT)
        yield from self.backend.export_hf()

    def state(self) -> BackendState:
        self.world.tell(STATE)
        return self.backend.state()

    def share(self, folder: Path) -> BackendState:
        self.world.tell(SHARE, {"folder": ranks.from_text(str(folder))})
        return self.backend.state(self.world.part)

    def restore(self, state: BackendState) -> None:
        kinds = sorted({key.partition("/")[0] for key in state.optimizer})
        told = {kind: torch.ones(1) for kind in kinds}
        self.world.tell(RESTORE, told | {"updates": torch.tensor(state.updates)})
        self.backend.restore(state, updates=state.updates, kinds=kinds)


def follow(backend: Together, world: World, config: RunConfig) -> None:
    """Any other rank: take part in what rank 0 is called for, until it ends."""
    with ShareWriter(config.training.checkpoint_timeout_s) as writer:
        while take_part(backend, world, config, writer):
            pass


def take_part(backend: Together, world: World, config: RunConfig, writer: ShareWriter) -> bool:
    """Take part in one call; return whether there may be another."""
    call, told = world.heed()
    if call == LOGPROBS:
        backend.logprobs(ranks.from_tensors(told, 0)[0])
    elif call == STEP:
        is_read = "draws" in told
        batches = reread(told, config) if is_read else ranks.from_tensors(told, 0)
        with suppress(DivergedError):  # rank 0 has the same, and decides
            backend.train_step(batches)
    elif call == EXPORT:
        for _ in backend.export_hf():
            pass
    elif call == STATE:
        backend.state(NOTHING)
    elif call == SHARE:
        share, folder = backend.state(world.part), Path(ranks.to_text(told["folder"]))
        writer.begin(partial(write_share, folder, share, world.part))
    elif call == RESTORE:
        updates = int(told.pop("updates"))
        backend.restore(None, updates=updates, kinds=sorted(told))
    return call != ranks.END
