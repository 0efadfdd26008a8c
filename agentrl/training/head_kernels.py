"""The head's arithmetic on a GPU, CUDA or ROCm: one pass over a tile where torch takes several.

Each function does what its namesake in `head` does; tests hold them equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # comes with torch's GPU builds only
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def add_tile(
    logits: Tensor, targets: Tensor, start: int, scale: float, sums: Sequence[Tensor]
) -> None:
    """Take the logits of words `start` … into the running sums, in place."""
    rows, words = logits.shape
    _add_tile[(rows,)](
        logits, targets, *sums, start, scale, words, logits.stride(0), BLOCK=2048, num_warps=1
    )


def write_slope(
    logits: Tensor, start: int, scale: float, known: Sequence[Tensor], out: Tensor
) -> None:
    """Write dL/dlogits of one tile; `known` as in `head.write_slope`."""
    targets, log_total, up_logprob, *entropies = known
    entropy, up_entropy = entropies or (log_total, up_logprob)
    rows, words = logits.shape
    block = 4096
    _write_slope[(rows, triton.cdiv(words, block))](
        logits,
        out,
        targets,
        log_total,
        up_logprob,
        entropy,
        up_entropy,
        start,
        scale,
        words,
        logits.stride(0),
        out.stride(0),
        HAS_ENTROPY=bool(entropies),
        BLOCK=block,
        num_warps=4,
    )


def to_half(tensor: Tensor) -> Tensor:
    """Return a float16 copy, at the memory's rate: torch's own took three times as long."""
    flat = tensor.contiguous()
    half = torch.empty_like(flat, dtype=torch.float16)
    count, block = flat.numel(), 4096
    _to_half[(triton.cdiv(count, block),)](flat, half, count, BLOCK=block, num_warps=8)
    return half


def write_scaled(source: Tensor, unit: Tensor, answer: Tensor) -> None:
    """Write `source` times `unit`, a single number, into `answer`; both contiguous."""
    count, block = source.numel(), 4096
    _write_scaled[(triton.cdiv(count, block),)](
        source, unit, answer, count, BLOCK=block, num_warps=4
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_scaled(source, unit, answer, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    here = tl.load(source + places, mask=inside) * tl.load(unit)
    tl.store(answer + places, here.to(answer.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _to_half(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    here = tl.load(source + places, mask=inside)
    tl.store(target + places, here.to(tl.float16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_tile(  # type: ignore[no-untyped-def]
    logits,
    targets,
    tops,
    totals,
    weighteds,
    chosens,
    start,
    scale,
    words,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    factor = scale * LOG2_E  # powers of 2 are what the hardware has
    top = tl.load(tops + row) * LOG2_E
    total = tl.load(totals + row)
    weighted = tl.load(weighteds + row) * LOG2_E
    place = tl.load(targets + row) - start
    columns = tl.arange(0, BLOCK)
    whole = words // BLOCK * BLOCK
    for first in tl.range(0, whole, BLOCK, num_stages=3):  # loads ahead, and no mask
        scaled = tl.load(line + first + columns).to(tl.float32) * factor
        top, total, weighted = _added(scaled, scaled, top, total, weighted)
    if whole < words:
        inside = whole + columns < words
        scaled = tl.load(line + whole + columns, mask=inside, other=float("-inf"))
        scaled = scaled.to(tl.float32) * factor
        counted = tl.where(inside, scaled, 0.0)
        top, total, weighted = _added(scaled, counted, top, total, weighted)
    tl.store(tops + row, top / LOG2_E)
    tl.store(totals + row, total)
    tl.store(weighteds + row, weighted / LOG2_E)
    if (place >= 0) & (place < words):
        tl.store(chosens + row, tl.load(line + place).to(tl.float32) * scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _added(scaled, counted, top, total, weighted):  # type: ignore[no-untyped-def]
    new_top = tl.maximum(top, tl.max(scaled, 0))
    shares, shrink = tl.exp2(scaled - new_top), tl.exp2(top - new_top)
    total = total * shrink + tl.sum(shares, 0)
    weighted = weighted * shrink + tl.sum(shares * counted, 0)
    return new_top, total, weighted


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_slope(  # type: ignore[no-untyped-def]
    logits,
    out,
    targets,
    log_totals,
    up_logprobs,
    entropies,
    up_entropies,
    start,
    scale,
    words,
    stride,
    out_stride,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    scaled = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=0.0)
    log_p = scaled.to(tl.float32) * scale - tl.load(log_totals + row)
    chance = tl.exp(log_p)
    up = tl.load(up_logprobs + row)
    slope = -up * chance
    if HAS_ENTROPY:
        gap = log_p + tl.load(entropies + row)
        slope -= tl.load(up_entropies + row) * chance * gap
    place = tl.load(targets + row) - start
    slope = tl.where(columns == place, slope + up, slope) * scale
    here = out + row.to(tl.int64) * out_stride + columns
    tl.store(here, slope.to(out.dtype.element_ty), mask=inside)
