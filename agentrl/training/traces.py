"""Traces for supervised fine-tuning: reading them, and dealing them into batches of like length."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import RecordError
from agentrl.handoff.spool import read_group

POOL_BATCHES = 16
"""Batches' worth of random traces that are sorted by length together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True where the assistant wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceBatch:
    tokens: Tensor
    """[B, T] int64, zeros right of each row's end."""
    source: Tensor
    """[N] int64 into [B·T]: the position before each token that has a weight."""
    targets: Tensor
    """[N] int64."""
    weights: Tensor
    """[N] float32: 1 where the assistant wrote, else context_weight."""
    written: Tensor
    """[N] bool: where the assistant wrote."""
    real_tokens: int


def read_traces(source: Path) -> list[Trace]:
    """Read a folder of spool files, or a JSONL of {"tokens": […], "loss_mask": […]}.

    Raises RecordError for an unreadable one, and when there is none.
    """
    if source.is_dir():
        traces = [
            Trace(tokens=item.tokens, loss_mask=item.loss_mask)
            for path in sorted(source.rglob("*.parquet"))
            for item in read_group(path).trajectories
        ]
    elif source.is_file():
        lines = source.read_text().splitlines()
        traces = [_parse(line, f"{source}:{number}") for number, line in enumerate(lines, start=1)]
    else:
        raise RecordError(f"traces {source}: no such file or folder; make them first")
    usable = [trace for trace in traces if len(trace.tokens) > 1]
    if not usable:
        raise RecordError(f"traces {source}: none of {len(traces)} has 2 tokens or more")
    return usable


def check_words(traces: Sequence[Trace], vocabulary: int, source: Path) -> None:
    """Raise RecordError for a trace with tokens that the model does not have."""
    for number, trace in enumerate(traces):
        least, most = int(trace.tokens.min()), int(trace.tokens.max())
        if least < 0 or most >= vocabulary:
            raise RecordError(
                f"traces {source}: trace {number} has tokens {least} to {most}, and the model's "
                f"vocabulary {vocabulary} words; make them with this model's tokenizer"
            )


def deal(traces: Sequence[Trace], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch, as indices: every trace once, in an order by the seed."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(traces)))
    rng.shuffle(order)
    pool = batch * POOL_BATCHES
    batches = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda index: len(traces[index].tokens))
        batches += [near[first : first + batch] for first in range(0, len(near), batch)]
    rng.shuffle(batches)
    return batches


def stack(traces: Sequence[Trace], context_weight: float) -> TraceBatch:
    """Pad `traces` on the right to one rectangle, and gather the tokens that have a weight."""
    width = max(len(trace.tokens) for trace in traces)
    tokens = torch.zeros((len(traces), width), dtype=torch.int64)
    weights = torch.zeros((len(traces), width))
    written = torch.zeros((len(traces), width), dtype=torch.bool)
    for row, trace in enumerate(traces):
        length = len(trace.tokens)
        tokens[row, :length] = torch.tensor(trace.tokens, dtype=torch.int64)
        written[row, :length] = torch.tensor(trace.loss_mask)
        weights[row, :length] = torch.where(written[row, :length], 1.0, context_weight)
    weights[:, 0] = 0.0
    chosen = weights.reshape(-1).nonzero().squeeze(1)
    return TraceBatch(
        tokens=tokens,
        source=chosen - 1,
        targets=tokens.reshape(-1)[chosen],
        weights=weights.reshape(-1)[chosen],
        written=written.reshape(-1)[chosen],
        real_tokens=sum(len(trace.tokens) for trace in traces),
    )


def _parse(line: str, where: str) -> Trace:
    try:
        record = json.loads(line)
        trace = Trace(
            tokens=np.asarray(record["tokens"], dtype=np.int32),
            loss_mask=np.asarray(record["loss_mask"], dtype=np.bool_),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RecordError(f"{where}: not a trace with tokens and loss_mask ({error!r})") from error
    if trace.tokens.ndim != 1 or trace.tokens.shape != trace.loss_mask.shape:
        raise RecordError(
            f"{where}: tokens {trace.tokens.shape} and loss_mask {trace.loss_mask.shape} "
            "must be lists of one length"
        )
    return trace
