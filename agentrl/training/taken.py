"""What rank 0 took for a step, told so that each other rank reads it from the spool itself."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from agentrl.handoff.spool import list_files, read_group
from agentrl.training.intake import make_batch
from agentrl.training.packing import MicroBatch, pack_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The groups that rank 0 took for one step."""

    draws: tuple[int, ...]
    """In the order in which they were scored."""
    nodes: tuple[int, ...]
    """That wrote them: after a node was lost, another may write the same draw again."""
    version: int


def as_tensors(taken: Taken, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return what `reread` needs to come to the same micro-batches, and to know that it did."""
    return {
        "draws": torch.tensor(taken.draws),
        "nodes": torch.tensor(taken.nodes),
        "version": torch.tensor(taken.version),
        "digest": torch.tensor(digest(batches)),
    }


def reread(told: Mapping[str, Tensor], config: RunConfig) -> list[MicroBatch]:
    """Return the step's micro-batches from the spool. Raises LaunchError where they differ."""
    draws, nodes = told["draws"].tolist(), told["nodes"].tolist()
    spool = config.run_dir / "spool"
    pairs = zip(draws, nodes, strict=True)
    paths = [spool / str(node) / f"{draw:08d}.parquet" for draw, node in pairs]
    present = {path for _, path in list_files(spool)}
    if missing := [str(path) for path in paths if path not in present]:
        raise LaunchError(
            f"{', '.join(missing)}: rank 0 read them, this rank does not see them; the trainer's "
            "ranks must see one filesystem"
        )
    groups = [read_group(path) for path in paths]
    batch = make_batch(groups, int(told["version"]), config, Counter())
    batches = pack_step(batch.samples, config.training)
    if digest(batches) != int(told["digest"]):
        raise LaunchError(
            f"draws {draws} in {spool} are not, for this rank, what rank 0 read: files there "
            "were changed while the step began"
        )
    return batches


def digest(batches: Sequence[MicroBatch]) -> int:
    """Return a CRC-32 over all that a step's loss is computed from."""
    found = 0
    for batch in batches:
        for item in fields(batch):
            part = getattr(batch, item.name)
            if isinstance(part, Tensor) and part.numel():
                found = zlib.crc32(part.numpy().data.cast("B"), found)
    return found
