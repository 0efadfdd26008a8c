"""`rows.sum_rows` on a GPU, CUDA or ROCm: each row is read once and nothing is written but sums."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # comes with torch's GPU builds only
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor


def summed(rows: Tensor, places: Tensor) -> Tensor:
    """Return [tokens, width] of rows [n, width], contiguous, and places [tokens, k]."""
    tokens, number = places.shape
    width = rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        grid = (tokens, triton.cdiv(width, block))
        _summed[grid](rows, places, out, width, NUMBER=number, BLOCK=block, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _summed(rows, places, out, width, NUMBER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for which in tl.static_range(NUMBER):
        place = tl.load(places + token * NUMBER + which)
        total += tl.load(rows + place * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
