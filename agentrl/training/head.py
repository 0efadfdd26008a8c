"""The language-model head: log-probabilities and entropy of rows, without the logits in memory.

Logits exist one tile (rows × words) at a time. Forward keeps running sums over the words (online
softmax, arXiv:1805.02867); backward computes each tile again from the saved log-sum-exp, but for
the one that forward left it, turns it into its gradient in place and multiplies that away: three
products of [rows, words, hidden] where one tile is all, else up to four. The products are torch's,
on CUDA and ROCm alike; on a GPU the arithmetic between them is Triton's (head_kernels), checked
against the functions here.

bfloat16 rows and words are multiplied as float16 on a GPU: both are exact in it (a final norm's
output is within √width times its weights, far from 65,504; a word's numbers under 6e-5 are rounded
to 6e-8), and its logits take half of float32's memory traffic with an eighth of bfloat16's error.
So are their gradients, in a unit that keeps them in its range; what comes of them is summed in
float32 and rounded once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How many rows and words one product takes; its logits are in memory, 2 bytes each on a GPU.

    Large tiles are fast, for the last one's logits need not be computed again. Small ones save
    memory. docs/trainer.md has figures of both.
    """

    whole_rows: int = 32_768
    """Up to so many rows are taken at once."""
    whole_logits: int = 5 * 2**27
    """Logits of a tile of all rows: 1.25 GiB."""
    rows: int = 8192
    """Rows of a part."""
    logits: int = 2**25
    """Logits of a part's tile: 64 MiB."""

    def __post_init__(self) -> None:
        if min(self.whole_rows, self.whole_logits, self.rows, self.logits) < 1:
            raise ValueError(f"{self}: each must be 1 or more")

    def cut(self, rows: int) -> tuple[int, int]:
        """Return how many rows and words to take at once, whole 128s of words where it can be."""
        is_whole = rows <= max(self.whole_rows, self.rows)
        taken = rows if is_whole else self.rows
        fitting = (self.whole_logits if is_whole else self.logits) // taken
        return taken, max(1, fitting if fitting < 128 else fitting // 128 * 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """This rank's words of a head that is cut over `group`: `start` and as many as it has rows."""

    start: int
    group: dist.ProcessGroup


PLAIN_TILE = Tile(whole_logits=2**25)
"""Where plain torch does the arithmetic, which takes the room of a tile several times over."""
PRODUCT_WORDS = 4096
"""Words whose gradient is wide at a time: 32 MiB at hidden 2,048, within a large GPU's cache."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # loops over tiles would be unrolled
def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    tile: Tile | None = None,
    shard: Shard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each row's target, entropy of each row), nats, [N].

    The answer is float32, float64 where the inputs are.
    hidden [N, H]; weight [V, H], of the same dtype; targets [N] int64, in the whole vocabulary.
    With a shard, weight holds that rank's words only; all ranks get the same answer, and each
    the whole gradient of `hidden` and its own of `weight`.
    tile: None takes what suits the device.
    """
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: give one dtype")
    if not len(hidden):
        nothing = hidden.sum(-1) + 0 * weight.sum()
        return nothing, nothing
    if tile is None:
        tile = PLAIN_TILE if _kernels_of(hidden.device.type) is None else Tile()
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    answer = _Head.apply(hidden, weight, targets, 1 / temperature, tile, shard, needs_gradient)  # type: ignore[no-untyped-call]
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
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        if shard:
            targets = targets - shard.start
        sums, last = _sums(hidden, weight, targets, scale, tile)
        if shard:
            sums = _over_shards(sums, shard.group)
        top, total, weighted, chosen = sums
        log_total = top + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, targets, log_total, entropy)
        ctx.scale, ctx.tile, ctx.shard = scale, tile, shard
        ctx.last = last if needs_gradient else None
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_total, entropy = ctx.saved_tensors
        up_logprob, up_entropy = upstream
        if up_logprob is None:
            up_logprob = torch.zeros_like(log_total)
        unit = _unit(ctx.scale, up_logprob, up_entropy, entropy)
        known = [targets, log_total, up_logprob / unit]
        known += [] if up_entropy is None else [entropy, up_entropy / unit]
        grads = _gradients(ctx, hidden, weight, known, unit=unit)
        return *grads, None, None, None, None, None


Sums = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each row, [N]: the largest logit m, Σ e^(z−m), Σ z·e^(z−m), and the target's logit."""


def _sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, tile: Tile
) -> tuple[Sums, Tensor]:
    """Return the sums of all words, and the logits of the last tile."""
    add, _ = _arithmetic(hidden.device.type)
    top = torch.full((len(hidden),), -torch.inf, dtype=_wide(hidden), device=hidden.device)
    sums = (top, torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top))
    left, (taken, at_once) = _factor(hidden), tile.cut(len(hidden))
    logits = left.new_empty(0)
    for words in _spans(len(weight), at_once):
        right = _factor(weight[words]).T
        for rows in _spans(len(hidden), taken):
            del logits  # before the next is made
            logits = left[rows] @ right
            add(logits, targets[rows], words.start, scale, [part[rows] for part in sums])
    return sums, logits


def add_tile(
    logits: Tensor, targets: Tensor, start: int, scale: float, sums: Sequence[Tensor]
) -> None:
    """Take the logits of words `start` … into the running sums, in place."""
    top, total, weighted, chosen = sums
    scaled = logits.to(top.dtype) * scale
    new_top = torch.maximum(top, scaled.amax(-1))
    shares = torch.exp(scaled - new_top[:, None])
    shrink = torch.exp(top - new_top)
    place = targets - start
    is_here = (place >= 0) & (place < logits.shape[1])
    here = scaled.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    top.copy_(new_top)
    total.mul_(shrink).add_(shares.sum(-1))
    weighted.mul_(shrink).add_((shares * scaled).sum(-1))
    chosen.add_(torch.where(is_here, here, torch.zeros_like(here)))


def _over_shards(sums: Sums, group: dist.ProcessGroup) -> Sums:
    top, *rest = sums
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shrink = torch.exp(top - highest)
    parts = torch.stack([rest[0] * shrink, rest[1] * shrink, rest[2]])
    dist.all_reduce(parts, group=group)
    total, weighted, chosen = parts.unbind()
    return highest, total, weighted, chosen


def _unit(scale: float, up_logprob: Tensor, up_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """Return the power of 2 in which slopes are counted: the steepest is under 2^15 of it.

    Then float16 holds in full what is up to 2^29 times flatter. `write_slope` is bounded with
    |p log p| < 1. No number where an upstream gradient is none, and so are the gradients.
    """
    steepest = up_logprob.abs()
    if up_entropy is not None:
        steepest = steepest + up_entropy.abs() * (entropy + 1)
    largest = (steepest.amax() * abs(scale)).clamp(min=1e-20)
    return torch.exp2(torch.log2(largest).ceil() - 15)


def _gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, known: Sequence[Tensor], *, unit: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight.

    known: what `write_slope` needs of each row, upstream gradients in units.
    """
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    weight_grad = _empty(weight) if needs_weight else None
    hidden_grad: Tensor | None = None
    if needs_hidden:
        hidden_grad = torch.zeros(hidden.shape, dtype=_wide(hidden), device=hidden.device)
    _fill(ctx, hidden, weight, known, unit=unit, hidden_grad=hidden_grad, weight_grad=weight_grad)
    if hidden_grad is None:
        return None, weight_grad
    if ctx.shard:
        dist.all_reduce(hidden_grad, group=ctx.shard.group)
    answer = _empty(hidden)
    _write_scaled(hidden_grad, unit, answer)
    return answer, weight_grad


def _fill(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    known: Sequence[Tensor],
    *,
    unit: Tensor,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> None:
    """Add to hidden_grad, wide and in units, and write weight_grad, a tile at a time."""
    _, write_slope = _arithmetic(hidden.device.type)
    total: Tensor | None = None  # the gradient of a tile's words, over parts of the rows
    for words, rows, logits, left, right in _tiles_again(ctx, hidden, weight):
        if not _sums_wide(left):
            left, right = hidden[rows], weight[words]
        slope = logits.view(left.dtype)  # of the same size: it is written over the logits
        write_slope(logits, words.start, ctx.scale, [one[rows] for one in known], slope)
        if hidden_grad is not None:
            _add_product(hidden_grad[rows], slope, right)
        if weight_grad is not None and len(slope) == len(hidden):
            _write_product(weight_grad[words], slope.T, left, unit)
        elif weight_grad is not None:
            total = _product(slope.T, left) if total is None else _add_product(total, slope.T, left)
            if not rows.start:
                _write_scaled(total, unit, weight_grad[words])
                total = None
        del left, right  # before the next are made


def _tiles_again(
    ctx: Any, hidden: Tensor, weight: Tensor
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield (words, rows, logits, their factors) of tiles, all rows of some words before others.

    They come in the reverse of forward's order, whose last tile may be there yet. All logits lie in
    the same place, and the taker may write over them.
    """
    count = len(hidden)
    taken, at_once = ctx.tile.cut(count)
    most = taken * min(at_once, len(weight))
    last, ctx.last = ctx.last, None  # written over here: a second backward makes it anew
    whole = _factor(hidden) if taken == count else None
    room = _factor(hidden[:1]).new_empty(most) if last is None else last.view(-1)
    for words in reversed(list(_spans(len(weight), at_once))):
        right = _factor(weight[words])
        for rows in reversed(list(_spans(count, taken))):
            # many rows have too much memory for a copy of all, few have it at hand
            left = _factor(hidden[rows]) if whole is None else whole
            logits = room[: len(left) * len(right)].view(len(left), len(right))
            if last is None:
                torch.mm(left, right.T, out=logits)
            last = None
            yield words, rows, logits, left, right
            del left
        del right


def write_slope(
    logits: Tensor, start: int, scale: float, known: Sequence[Tensor], out: Tensor
) -> None:
    """Write dL/dlogits of one tile: u·(1[target] − p) − v·p·(log p + entropy), times the scale.

    known, of each row: target, log-sum-exp, u = dL/dlogprob; then perhaps entropy, v = dL/dentropy.
    """
    targets, log_total, up_logprob, *entropies = known
    log_p = logits.to(log_total.dtype) * scale - log_total[:, None]
    chance = torch.exp(log_p)
    slope = -up_logprob[:, None] * chance
    if entropies:
        entropy, up_entropy = entropies
        slope = slope - up_entropy[:, None] * chance * (log_p + entropy[:, None])
    words = torch.arange(start, start + logits.shape[1], device=logits.device)
    slope = torch.where(words == targets[:, None], slope + up_logprob[:, None], slope)
    out.copy_(slope * scale)


def _spans(total: int, size: int) -> Iterator[slice]:
    """Yield slices of `size`; what is left over comes first."""
    stops = range(total % size or size, total + 1, size)
    return (slice(max(0, stop - size), stop) for stop in stops)


def _empty(like: Tensor) -> Tensor:
    """Return a contiguous one, however `like` lies."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _factor(tensor: Tensor) -> Tensor:
    """Return a factor of the logits as this device multiplies it: see above."""
    if not tensor.is_cuda or tensor.dtype != torch.bfloat16:
        return tensor
    kernels = _kernels_of(tensor.device.type)
    return tensor.half() if kernels is None else cast(Tensor, kernels.to_half(tensor))


def _sums_wide(factor: Tensor) -> bool:
    """Whether products of such factors can be had in the wide dtype."""
    return factor.dtype == _wide(factor) or _writes_float32(factor.device.type, factor.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return it in the wide dtype, summed in it where the device can."""
    if left.dtype != _wide(left) and _sums_wide(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(_wide(left))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add it to total, which is of the wide dtype, in place."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if _sums_wide(left):
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(left @ right)


def _write_product(answer: Tensor, left: Tensor, right: Tensor, unit: Tensor) -> None:
    """Write the product times unit, some rows of it at a time: they are wide before."""
    for rows in _spans(len(left), PRODUCT_WORDS):
        _write_scaled(_product(left[rows], right), unit, answer[rows])


def _write_scaled(source: Tensor, unit: Tensor, answer: Tensor) -> None:
    kernels = _kernels_of(source.device.type)
    if kernels is None:
        torch.mul(source, unit, out=answer)
    else:
        kernels.write_scaled(source, unit, answer)


@functools.cache
def _writes_float32(device: str, dtype: torch.dtype) -> bool:
    """Try it: torch before 2.8, CPUs and some builds refuse a wider result than the inputs."""
    tiny = torch.ones((16, 16), dtype=dtype, device=device)
    try:
        wide = torch.mm(tiny, tiny, out_dtype=torch.float32)
        torch.addmm(wide, tiny, tiny, out_dtype=torch.float32, out=wide)
    except torch.cuda.OutOfMemoryError:  # says nothing of what the device can
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def _arithmetic(device: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (add_tile, write_slope) for a kind of device: Triton's where torch brings it."""
    kernels = _kernels_of(device)
    if kernels is None:
        return add_tile, write_slope
    return kernels.add_tile, kernels.write_slope


@functools.cache
def _kernels_of(device: str) -> Any:
    """Return head_kernels, None on a CPU and where torch brings no Triton."""
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("agentrl.training.head_kernels")
