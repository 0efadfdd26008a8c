"""The language-model head: log-probabilities and entropy of rows, without the logits in memory.

Logits exist one tile (rows × words) at a time. Forward keeps running sums over the words (online
softmax, arXiv:1805.02867); backward computes each tile again from the saved log-sum-exp, turns it
into its gradient and multiplies it away: four products of [rows, words, hidden] in all instead of
three, and no [rows, vocabulary] anywhere. Plain torch, so ROCm and CUDA run the same code; on a GPU
the arithmetic between the products is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rows and words whose logits are in memory at once."""

    rows: int = 16_384
    words: int = 3_072

    def __post_init__(self) -> None:
        if self.rows < 1 or self.words < 1:
            raise ValueError(f"{self}: both sides of a tile must be 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """This rank's words of a head that is cut over `group`: `start` and as many as it has rows."""

    start: int
    group: dist.ProcessGroup


WHOLE_TILE = Tile()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # loops over tiles would be unrolled
def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    tile: Tile = WHOLE_TILE,
    shard: Shard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each row's target, entropy of each row), nats, [N].

    The answer is float32, float64 where the inputs are.
    hidden [N, H]; weight [V, H], of the same dtype; targets [N] int64, in the whole vocabulary.
    With a shard, weight holds that rank's words only; all ranks get the same answer, and each
    the whole gradient of `hidden` and its own of `weight`.
    """
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: give one dtype")
    if not len(hidden):
        nothing = hidden.sum(-1) + 0 * weight.sum()
        return nothing, nothing
    answer = _Head.apply(hidden, weight, targets, 1 / temperature, tile, shard)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], answer)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        tile: Tile,
        shard: Shard | None,
    ) -> tuple[Tensor, Tensor]:
        sums = _sums(hidden, weight, targets - (shard.start if shard else 0), scale, tile)
        if shard:
            sums = _over_shards(sums, shard.group)
        top, total, weighted, chosen = sums
        log_total = top + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, targets, log_total, entropy)
        ctx.scale, ctx.tile, ctx.shard = scale, tile, shard
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_total, entropy = ctx.saved_tensors
        up_logprob, up_entropy = upstream
        if up_logprob is None:
            up_logprob = torch.zeros_like(log_total)
        rows = [targets - (ctx.shard.start if ctx.shard else 0), log_total, up_logprob]
        rows += [] if up_entropy is None else [entropy, up_entropy]
        grads = _gradients(ctx, hidden, weight, rows)
        return *grads, None, None, None, None


Sums = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each row, [N]: the largest logit m, Σ e^(z−m), Σ z·e^(z−m), and the target's logit."""


def _sums(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, tile: Tile) -> Sums:
    add = _kernel(_add_tile, hidden.device.type)
    wide = _wide(hidden)
    top = torch.full((len(hidden),), -torch.inf, dtype=wide, device=hidden.device)
    zeros = torch.zeros_like(top)
    sums = (top, zeros, zeros.clone(), zeros.clone())
    for words, rows in _tiles(len(hidden), len(weight), tile):
        logits = _product(hidden[rows], weight[words])
        before = [part[rows] for part in sums]
        after = add(logits, targets[rows] - words.start, scale, *before)
        for part, new in zip(before, after, strict=True):
            part.copy_(new)
    return sums


def _add_tile(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    top: Tensor,
    total: Tensor,
    weighted: Tensor,
    chosen: Tensor,
) -> Sums:
    scaled = logits.to(top.dtype) * scale
    new_top = torch.maximum(top, scaled.amax(-1))
    shares = torch.exp(scaled - new_top[:, None])
    shrink = torch.exp(top - new_top)
    is_here = (targets >= 0) & (targets < logits.shape[1])
    place = targets.clamp(0, logits.shape[1] - 1)[:, None]
    here = logits.gather(1, place).squeeze(1).to(top.dtype) * scale
    return (
        new_top,
        total * shrink + shares.sum(-1),
        weighted * shrink + (shares * scaled).sum(-1),
        chosen + torch.where(is_here, here, torch.zeros_like(here)),
    )


def _over_shards(sums: Sums, group: dist.ProcessGroup) -> Sums:
    top, *rest = sums
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shrink = torch.exp(top - highest)
    parts = torch.stack([rest[0] * shrink, rest[1] * shrink, rest[2]])
    dist.all_reduce(parts, group=group)
    total, weighted, chosen = parts.unbind()
    return highest, total, weighted, chosen


def _gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, rows: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight; rows: what `_tile_gradient` needs of each row."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    wide = _wide(hidden)
    hidden_grad = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    weight_grad = torch.empty_like(weight) if needs_weight else None
    gradient = _kernel(_tile_gradient, hidden.device.type)
    part: Tensor | None = None
    for words, span in _tiles(len(hidden), len(weight), ctx.tile):
        logits = _product(hidden[span], weight[words])
        there, *others = (row[span] for row in rows)
        slope = gradient(logits, there - words.start, ctx.scale, hidden.dtype, *others)
        del logits
        if needs_hidden:
            _add_product(hidden_grad[span], slope, weight[words])
        if weight_grad is not None:
            if len(hidden) <= ctx.tile.rows:
                torch.mm(slope.T, hidden, out=weight_grad[words])
                continue
            if part is None or span.start == 0:
                part = torch.zeros(
                    (words.stop - words.start, hidden.shape[1]), dtype=wide, device=hidden.device
                )
            _add_product(part, slope.T, hidden[span])
            if span.stop == len(hidden):
                weight_grad[words] = part.to(weight.dtype)
    if needs_hidden and ctx.shard:
        dist.all_reduce(hidden_grad, group=ctx.shard.group)
    return hidden_grad.to(hidden.dtype) if needs_hidden else None, weight_grad


def _tile_gradient(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    dtype: torch.dtype,
    log_total: Tensor,
    up_logprob: Tensor,
    entropy: Tensor | None = None,
    up_entropy: Tensor | None = None,
) -> Tensor:
    """Return dL/dlogits of one tile: u·(1[target] − p) − v·p·(log p + entropy), times the scale."""
    log_p = logits.to(log_total.dtype) * scale - log_total[:, None]
    chance = torch.exp(log_p)
    slope = -up_logprob[:, None] * chance
    if entropy is not None and up_entropy is not None:
        slope = slope - up_entropy[:, None] * chance * (log_p + entropy[:, None])
    words = torch.arange(logits.shape[1], device=logits.device)
    slope = torch.where(words == targets[:, None], slope + up_logprob[:, None], slope)
    return (slope * scale).to(dtype)


def _tiles(rows: int, words: int, tile: Tile) -> Iterator[tuple[slice, slice]]:
    """Yield (words, rows) of every tile, all rows of the same words together."""
    for word in range(0, words, tile.words):
        for row in range(0, rows, tile.rows):
            yield (
                slice(word, min(word + tile.words, words)),
                slice(row, min(row + tile.rows, rows)),
            )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _product(rows: Tensor, words: Tensor) -> Tensor:
    """Return rows · wordsᵀ, in float32 where this device's matrix product can write it."""
    if rows.dtype != torch.bfloat16 or not _writes_float32(rows.device.type):
        return rows @ words.T
    return torch.mm(rows, words.T, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


@functools.cache
def _writes_float32(device: str) -> bool:
    """Try it: torch before 2.8, CPUs and some builds refuse a wider result than the inputs."""
    tiny = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
    try:
        torch.mm(tiny, tiny, out_dtype=torch.float32)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return function if device == "cpu" else torch.compile(function, dynamic=True)
