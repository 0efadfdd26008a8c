"""The language-model head: log-probabilities and entropy of rows, without the logits in memory.

Logits exist one tile (rows × words) at a time. Forward keeps running sums over the words (online
softmax, arXiv:1805.02867); backward computes each tile again from the saved log-sum-exp, but for
the one that forward left it, turns it into its gradient in place and multiplies that away: not
quite four products of [rows, words, hidden] in all instead of three, and no [rows, vocabulary]
anywhere. The products are torch's, on CUDA and ROCm alike; on a GPU the arithmetic between them is
Triton's (head_kernels), checked against the functions here.

bfloat16 rows and words are multiplied as float16 on a GPU: both are exact in it (a final norm's
output is within √width times its weights, far from 65,504; a word's numbers under 6e-5 are rounded
to 6e-8), and its logits take half of float32's memory traffic with an eighth of bfloat16's error.
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

    All rows at once are fastest. Many leave less room beside their gradient, and are cut in parts:
    of 151,936 words of 2,048 on an H200 32,768 rows take 1.24 GiB at once, gradients included, and
    in parts 1.02 and 3 to 5 % more time.
    """

    whole_rows: int = 32_768
    """Up to so many rows are taken at once."""
    whole_logits: int = 2**27
    """Logits of a tile of all rows: 256 MiB, of which forward leaves one to backward."""
    rows: int = 4096
    """Rows of a part."""
    logits: int = 2**25
    """Logits of a part's tile: 64 MiB."""

    def __post_init__(self) -> None:
        if min(self.whole_rows, self.whole_logits, self.rows, self.logits) < 1:
            raise ValueError(f"{self}: each must be 1 or more")

    def takes_whole(self, rows: int) -> bool:
        return rows <= max(self.whole_rows, self.rows)

    def cut(self, rows: int) -> tuple[int, int]:
        """Return how many rows and words to take at once, whole 128s of words where it can be."""
        is_whole = self.takes_whole(rows)
        taken = rows if is_whole else self.rows
        fitting = (self.whole_logits if is_whole else self.logits) // taken
        return taken, max(1, fitting if fitting < 128 else fitting // 128 * 128)


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
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    leaves = needs_gradient and tile.takes_whole(len(hidden))
    answer = _Head.apply(hidden, weight, targets, 1 / temperature, tile, shard, leaves)  # type: ignore[no-untyped-call]
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
        leaves: bool,
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
        ctx.scale, ctx.tile, ctx.shard, ctx.last = scale, tile, shard, last if leaves else None
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_total, entropy = ctx.saved_tensors
        up_logprob, up_entropy = upstream
        if up_logprob is None:
            up_logprob = torch.zeros_like(log_total)
        known = [targets, log_total, up_logprob]
        known += [] if up_entropy is None else [entropy, up_entropy]
        grads = _gradients(ctx, hidden, weight, known)
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


def _gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, known: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight; known: what `write_slope` needs of each row."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    hidden_grad = torch.zeros(hidden.shape, dtype=_wide(hidden), device=hidden.device)
    weight_grad = torch.empty_like(weight) if needs_weight else None
    wanted = hidden_grad if needs_hidden else None
    _fill(ctx, hidden, weight, known, hidden_grad=wanted, weight_grad=weight_grad)
    if needs_hidden and ctx.shard:
        dist.all_reduce(hidden_grad, group=ctx.shard.group)
    return hidden_grad.to(hidden.dtype) if needs_hidden else None, weight_grad


def _fill(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    known: Sequence[Tensor],
    *,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> None:
    """Add to hidden_grad, which is of the wide dtype, and write weight_grad, a tile at a time."""
    _, write_slope = _arithmetic(hidden.device.type)
    taken, at_once = ctx.tile.cut(len(hidden))
    if weight_grad is not None and taken < len(hidden):  # of some words, over parts of rows
        total = torch.zeros_like(weight[:at_once], dtype=_wide(weight))
    for words, rows, logits in _tiles_again(ctx, hidden, weight):
        slope = logits.view(hidden.dtype)  # of the same size: it is written over the logits
        write_slope(logits, words.start, ctx.scale, [one[rows] for one in known], slope)
        if hidden_grad is not None:
            _add_product(hidden_grad[rows], slope, weight[words])
        if weight_grad is None:
            continue
        if len(slope) == len(hidden):
            torch.mm(slope.T, hidden, out=weight_grad[words])
            continue
        if not rows.start:
            total.zero_()
        _add_product(total[: slope.shape[1]], slope.T, hidden[rows])
        if rows.stop == len(hidden):
            weight_grad[words] = total[: slope.shape[1]]


def _tiles_again(ctx: Any, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (words, rows, logits) of each tile, all rows of some words before other words.

    All logits lie in the same place, and the taker may write over them.
    """
    count = len(hidden)
    taken, at_once = ctx.tile.cut(count)
    most = taken * min(at_once, len(weight))
    last, ctx.last = ctx.last, None  # written over here: a second backward makes it anew
    left = _factor(hidden) if taken == count else None
    room = _factor(hidden[:1]).new_empty(most) if last is None else last.view(-1)
    for words in reversed(list(_spans(len(weight), at_once))):
        if last is not None:
            yield words, slice(0, count), last
            last = None
            continue
        right = _factor(weight[words]).T
        for rows in _spans(count, taken):
            logits = room[: (rows.stop - rows.start) * right.shape[1]].view(-1, right.shape[1])
            # many rows have too much memory for a copy of all, few have it at hand
            torch.mm(_factor(hidden[rows]) if left is None else left, right, out=logits)
            yield words, rows, logits


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


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _factor(tensor: Tensor) -> Tensor:
    """Return a factor of the logits as this device multiplies it: see above."""
    if not tensor.is_cuda or tensor.dtype != torch.bfloat16:
        return tensor
    kernels = _kernels()
    return tensor.half() if kernels is None else cast(Tensor, kernels.to_half(tensor))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.dtype == torch.bfloat16 and _writes_float32(left.device.type):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


@functools.cache
def _writes_float32(device: str) -> bool:
    """Try it: torch before 2.8, CPUs and some builds refuse a wider result than the inputs."""
    tiny = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
    try:
        wide = torch.zeros((16, 16), device=device)
        torch.addmm(wide, tiny, tiny, out_dtype=torch.float32, out=wide)
    except torch.cuda.OutOfMemoryError:  # says nothing of what the device can
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def _arithmetic(device: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (add_tile, write_slope) for a kind of device: Triton's where torch brings it."""
    kernels = None if device == "cpu" else _kernels()
    if kernels is None:
        return add_tile, write_slope
    return kernels.add_tile, kernels.write_slope


@functools.cache
def _kernels() -> Any:
    """Return head_kernels, None where torch brings no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("agentrl.training.head_kernels")
