"""Trajectories into micro-batches under a token budget.

Rows of like length are padded on the RIGHT to one rectangle. Causal attention never looks to
the right, so no attention mask is needed and the fast kernel is taken: measured on one core with a
4-layer, 128-wide model, rows padded like this ran 2 to 4 times as fast as one packed row with a
block-diagonal mask. The price is the padding, whose share is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory as the loss sees it."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    engine_logprobs: NDArray[np.float32]
    advantage: float
    weight: float = 0.0
    """Of each of its sampled tokens in the step's loss: see grpo.token_weights."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens in the loss; the first of a sequence has nothing to be predicted from."""
        return int(np.count_nonzero(self.loss_mask[1:]))

    def weighted(self, weight: float) -> Sample:
        return replace(self, weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """B rows of at most T tokens, and the N tokens among them that are in the loss."""

    tokens: Tensor
    """[B, T] int64, zeros right of each row's end."""
    source: Tensor
    """[N] int64 into the flattened [B·T] positions: the position BEFORE each token in the loss."""
    targets: Tensor
    """[N] int64, the tokens themselves."""
    engine_logprobs: Tensor
    """[N] float32."""
    advantages: Tensor
    """[N] float32."""
    weights: Tensor
    """[N] float32."""
    real_tokens: int
    """Tokens that are no padding."""

    @property
    def padding(self) -> int:
        return self.tokens.numel() - self.real_tokens


def pack(samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
    """Put every sample into a micro-batch of at most `budget` tokens, padding included.

    Longest first, neighbours in length together. A sample longer than the budget gets a
    micro-batch of its own: nothing is cut, and nothing is left out.
    """
    ordered = sorted(samples, key=lambda sample: -len(sample.tokens))
    batches: list[MicroBatch] = []
    rows: list[Sample] = []
    for sample in ordered:
        if rows and len(rows[0].tokens) * (len(rows) + 1) > budget:
            batches.append(stack(rows))
            rows = []
        rows.append(sample)
    return [*batches, stack(rows)] if rows else batches


def stack(rows: Sequence[Sample]) -> MicroBatch:
    """Pad `rows` to one rectangle and gather what the loss needs."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    engine = torch.zeros((len(rows), width), dtype=torch.float32)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens[index, :length] = torch.tensor(row.tokens, dtype=torch.int64)
        mask[index, :length] = torch.tensor(row.loss_mask, dtype=torch.bool)
        engine[index, :length] = torch.tensor(row.engine_logprobs, dtype=torch.float32)
    mask[:, 0] = False
    chosen = mask.reshape(-1).nonzero().squeeze(1)
    owner = torch.div(chosen, width, rounding_mode="floor")
    return MicroBatch(
        tokens=tokens,
        source=chosen - 1,
        targets=tokens.reshape(-1)[chosen],
        engine_logprobs=engine.reshape(-1)[chosen],
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32)[owner],
        weights=torch.tensor([row.weight for row in rows], dtype=torch.float32)[owner],
        real_tokens=sum(len(row.tokens) for row in rows),
    )


def padding_share(batches: Sequence[MicroBatch]) -> float:
    """Return the padding among all tokens computed, 0 to 1."""
    total = sum(batch.tokens.numel() for batch in batches)
    return sum(batch.padding for batch in batches) / total if total else 0.0
