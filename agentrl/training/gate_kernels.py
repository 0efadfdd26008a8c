"""`gate`'s two functions on a GPU, CUDA or ROCm: a program a row, each number read once."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # comes with torch's GPU builds only
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor


def forward(both: Tensor, chances: Tensor) -> Tensor:
    rows, inner = len(both), both.shape[1] // 2
    out = torch.empty((rows, inner), dtype=both.dtype, device=both.device)
    if rows:
        block = triton.next_power_of_2(inner)
        _forward[(rows,)](both.contiguous(), chances, out, inner, BLOCK=block, num_warps=4)
    return out


def backward(both: Tensor, chances: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = len(both), both.shape[1] // 2
    both = both.contiguous()
    halves, by_chance = torch.empty_like(both), torch.empty_like(chances)
    if rows:
        block = triton.next_power_of_2(inner)
        _backward[(rows,)](both, chances, grad, halves, by_chance, inner, BLOCK=block, num_warps=4)
    return halves, by_chance


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(both, chances, out, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    line = both + row * 2 * inner + columns
    gate = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + inner, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up * tl.load(chances + row)
    tl.store(out + row * inner + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(both, chances, grad, halves, by_chance, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    line = both + row * 2 * inner + columns
    gate = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + inner, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * inner + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    swish = gate * share
    scaled = slope * tl.load(chances + row)
    by_gate = scaled * up * share * (1 + gate * (1 - share))
    out = halves + row * 2 * inner + columns
    tl.store(out, by_gate.to(halves.dtype.element_ty), mask=inside)
    tl.store(out + inner, (scaled * swish).to(halves.dtype.element_ty), mask=inside)
    tl.store(by_chance + row, tl.sum(slope * swish * up, 0))
