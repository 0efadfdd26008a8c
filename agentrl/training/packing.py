"""Trajectories into micro-batches under a token budget: padded rows, or packed ones.

`padded`: rows of like length are padded on the RIGHT to one rectangle. Causal attention never looks
to the right, so no attention mask is needed and the fast kernel is taken: measured on one core with
a 4-layer, 128-wide model, rows padded like this ran 2 to 4 times as fast as one packed row with a
block-diagonal mask. The price is the padding, whose share is reported.
`packed`: one row of sequences end to end, for attention that knows their ends (`attention`): no
padding at all. Micro-batches are filled evenly, as many for each of the trainer's ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.config import TrainingConfig
from agentrl.engine.experts import Experts

ATTENTION_TOKENS = 14_000
"""Length at which a sequence's attention costs what its matrices do: 14k for Qwen3-30B-A3B, 8k for
Qwen3-0.6B, 25k for Qwen3-4B. Deals work out only, so that near is good enough."""

OWN = {torch.uint8: 255, torch.int16: -1}
"""In place of an expert, for tokens that only fill up: the one that the router chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory as the loss sees it."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    engine_logprobs: NDArray[np.float32]
    advantage: float
    weight: float = 0.0
    """Of each of its sampled tokens in the step's loss: see grpo.token_weights."""
    shares: NDArray[np.float32] | None = None
    """Of each token, what the weight is multiplied by; None: 1."""
    place: int = 0
    """Its own among the step's samples."""
    experts: Experts | None = None
    """[tokens, layers, k] that its tokens go to; None: as the routers choose."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens in the loss; the first of a sequence has nothing to be predicted from."""
        return int(np.count_nonzero(self.loss_mask[1:]))

    def placed(self, place: int, weight: float) -> Sample:
        return replace(self, place=place, weight=weight)


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
    places: Tensor
    """[N] int64, of the sample that each token is of."""
    real_tokens: int
    """Tokens that are no padding."""
    ends: Tensor | None = None
    """Packed, B = 1: [sequences + 1] int32, 0 and where each sequence ends. None: a row is one."""
    experts: Tensor | None = None
    """[B, T, layers, k] uint8 or int16 that tokens go to, OWN right of a row's end; None: those
    that routers choose."""
    token_shares: Tensor | None = None
    """[B, T] float32, of each token among all of the step, 0 right of a row's end; None: routers
    are not balanced (`balance`)."""

    @property
    def padding(self) -> int:
        return self.tokens.numel() - self.real_tokens

    @property
    def work(self) -> float:
        """What computing it costs, in tokens of short sequences."""
        rows, width = self.tokens.shape
        lengths = torch.tensor([width] * rows) if self.ends is None else self.ends.diff()
        return float((lengths * (1 + lengths / ATTENTION_TOKENS)).sum())


def pack(
    samples: Sequence[Sample],
    budget: int,
    *,
    is_packed: bool = False,
    ranks: int = 1,
    balances: bool = False,
) -> list[MicroBatch]:
    """Put every sample of a step into a micro-batch of at most `budget` tokens, padding included.

    ranks: of data parallelism, each of which gets as many packed micro-batches; balances: their
    tokens are told their shares.

    Longest first, neighbours in length together; or, packed, as even as may be. A sample longer
    than the budget gets a micro-batch of its own: nothing is cut, and nothing is left out.
    """
    ordered = sorted(samples, key=lambda sample: -len(sample.tokens))
    step_tokens = _tokens(samples) if balances else 0
    if is_packed:
        return [join(rows, step_tokens) for rows in _level(ordered, budget, ranks)]
    batches: list[MicroBatch] = []
    rows: list[Sample] = []
    for sample in ordered:
        if rows and len(rows[0].tokens) * (len(rows) + 1) > budget:
            batches.append(stack(rows, step_tokens))
            rows = []
        rows.append(sample)
    return [*batches, stack(rows, step_tokens)] if rows else batches


def pack_step(samples: Sequence[Sample], config: TrainingConfig) -> list[MicroBatch]:
    """Pack a step's samples as the config says."""
    return pack(
        samples,
        config.micro_batch_tokens,
        is_packed=config.packing == "packed",
        ranks=config.ranks // (config.tensor_parallel * config.pipeline_parallel),
        balances=config.router_balance_coef > 0,
    )


def _level(ordered: Sequence[Sample], budget: int, ranks: int) -> list[list[Sample]]:
    """Deal samples, longest first, each to the bin with the fewest tokens.

    As few bins as keep the budget, a multiple of `ranks` while there are samples for it.
    """
    total = sum(len(sample.tokens) for sample in ordered)
    number = min(len(ordered), ranks * max(1, -(-total // (budget * ranks))))
    while True:
        bins: list[list[Sample]] = [[] for _ in range(number)]
        heap = [(0, place) for place in range(number)]
        for sample in ordered:
            filled, place = heapq.heappop(heap)
            bins[place].append(sample)
            heapq.heappush(heap, (filled + len(sample.tokens), place))
        is_kept = all(len(one) == 1 or _tokens(one) <= budget for one in bins)
        if is_kept or number == len(ordered):
            return bins
        number = min(len(ordered), number + ranks)


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def deal(batches: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches: as many for each, near as much work, heaviest first.

    Where there are too few, some get one that has no token in the loss: ranks gather each layer
    together, so each must go through the model as often as the others.
    """
    each = -(-len(batches) // ranks)
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for batch in sorted(batches, key=lambda batch: -batch.work):
        open_ones = [rank for rank in range(ranks) if len(hands[rank]) < each]
        rank = min(open_ones, key=lambda rank: loads[rank])
        hands[rank].append(batch)
        loads[rank] += batch.work
    return [[*hand, *[nothing()] * (each - len(hand))] for hand in hands]


def nothing() -> MicroBatch:
    """Return a micro-batch of one token, none of it in the loss."""
    none = torch.zeros(0)
    return MicroBatch(
        tokens=torch.zeros((1, 1), dtype=torch.int64),
        source=none.long(),
        targets=none.long(),
        engine_logprobs=none,
        advantages=none,
        weights=none,
        places=none.long(),
        real_tokens=0,
    )


def join(rows: Sequence[Sample], step_tokens: int = 0) -> MicroBatch:
    """Lay `rows` end to end in one row, and note where each ends.

    step_tokens: that tokens are told their share of; 0: they are not.
    """
    lengths = torch.tensor([len(row.tokens) for row in rows])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.from_numpy(np.concatenate([row.tokens for row in rows]).astype(np.int64))
    mask = torch.from_numpy(np.concatenate([row.loss_mask for row in rows]).astype(np.bool_))
    engine = np.concatenate([row.engine_logprobs for row in rows]).astype(np.float32)
    mask[ends[:-1]] = False
    chosen = mask.nonzero().squeeze(1)
    owner = torch.searchsorted(ends[1:], chosen, right=True)
    shares = torch.from_numpy(np.concatenate([_shares(row) for row in rows]))
    return MicroBatch(
        tokens=tokens[None],
        source=chosen - 1,
        targets=tokens[chosen],
        engine_logprobs=torch.from_numpy(engine)[chosen],
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32)[owner],
        weights=torch.tensor([row.weight for row in rows])[owner] * shares[chosen],
        places=torch.tensor([row.place for row in rows])[owner],
        real_tokens=int(ends[-1]),
        ends=ends.to(torch.int32),
        experts=_stacked_experts(rows, packs=True),
        token_shares=_token_shares(rows, step_tokens, packs=True),
    )


def stack(rows: Sequence[Sample], step_tokens: int = 0) -> MicroBatch:
    """Pad `rows` to one rectangle and gather what the loss needs; step_tokens: as `join` has it."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    engine, shares = torch.zeros(2, len(rows), width).unbind()
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens[index, :length] = torch.tensor(row.tokens, dtype=torch.int64)
        mask[index, :length] = torch.tensor(row.loss_mask, dtype=torch.bool)
        engine[index, :length] = torch.tensor(row.engine_logprobs, dtype=torch.float32)
        shares[index, :length] = torch.from_numpy(_shares(row))
    mask[:, 0] = False
    chosen = mask.reshape(-1).nonzero().squeeze(1)
    owner = torch.div(chosen, width, rounding_mode="floor")
    return MicroBatch(
        tokens=tokens,
        source=chosen - 1,
        targets=tokens.reshape(-1)[chosen],
        engine_logprobs=engine.reshape(-1)[chosen],
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32)[owner],
        weights=torch.tensor([row.weight for row in rows])[owner] * shares.reshape(-1)[chosen],
        places=torch.tensor([row.place for row in rows])[owner],
        real_tokens=sum(len(row.tokens) for row in rows),
        experts=_stacked_experts(rows, packs=False),
        token_shares=_token_shares(rows, step_tokens, packs=False),
    )


def _stacked_experts(rows: Sequence[Sample], *, packs: bool) -> Tensor | None:
    """Return the rows' experts end to end, or padded; None where no row has any."""
    found = [row.experts for row in rows if row.experts is not None]
    if not found:
        return None
    if len(found) != len(rows):
        raise ValueError(f"{len(found)} of {len(rows)} samples have experts; must be all or none")
    kind = np.uint8 if all(one.dtype == np.uint8 for one in found) else np.int16
    parts = [torch.from_numpy(one.astype(kind)) for one in found]
    if packs:
        return torch.cat(parts)[None]
    return pad_sequence(parts, batch_first=True, padding_value=OWN[parts[0].dtype])


def _token_shares(rows: Sequence[Sample], step_tokens: int, *, packs: bool) -> Tensor | None:
    if not step_tokens:
        return None
    parts = [torch.full((len(row.tokens),), 1 / step_tokens) for row in rows]
    return torch.cat(parts)[None] if packs else pad_sequence(parts, batch_first=True)


def _shares(row: Sample) -> NDArray[np.float32]:
    return np.ones(len(row.tokens), dtype=np.float32) if row.shares is None else row.shares


def padding_share(batches: Sequence[MicroBatch]) -> float:
    """Return the padding among all tokens computed, 0 to 1."""
    total = sum(batch.tokens.numel() for batch in batches)
    return sum(batch.padding for batch in batches) / total if total else 0.0
