"""Attention of a packed row's sequences by scaled_dot_product_attention, in windows of few lengths.

On Hopper SDPA is cuDNN's, 1.4 to 1.7 times as fast as the varlen kernel (H200, torch 2.11, 32 heads
on 4), but builds a plan for every new length, which takes 0.2 s. So each sequence is attended to in
a window whose length is one of few, reaching over what lies behind it: causal rows never look to
the right, so that changes nothing, and what the window gives there is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST = 512
PARTS = 16
"""Steps to a window at the most, and half as many at the least: at most an 8th of one is waste."""
WORTH = 1024
"""Tokens of a mean sequence from which many calls beat one."""


def window(length: int) -> int:
    """Return the length of a sequence's window: 40 of them reach to 64k tokens."""
    step = SHORTEST
    while step * PARTS < length:
        step *= 2
    return -(-length // step) * step


def takes_windows(query: Tensor, lengths: Sequence[int]) -> bool:
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] >= 9
        and sum(lengths) >= WORTH * len(lengths)
    )


def attend_windows(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float | None
) -> Tensor:
    """Return [T, heads, dim] of [T, heads, dim] and, for key and value, as many heads or fewer."""
    records = torch.is_grad_enabled()
    answer = _Windows.apply(query, key, value, tuple(lengths), scale, records)  # type: ignore[no-untyped-call]
    return cast(Tensor, answer)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        scale: float | None,
        records: bool,
    ) -> Tensor:
        ctx.lengths, ctx.parts = lengths, []
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        padded = _reaching([query, key, value], lengths)
        records = records and any(ctx.needs_input_grad)
        for first, length in _places(lengths):
            inside = slice(first, first + window(length))
            mine = [
                part[inside].detach().transpose(0, 1)[None].requires_grad_(records)
                for part in padded
            ]
            with torch.set_grad_enabled(records):
                answer = _attend(mine[0], mine[1], mine[2], scale)
            out[first : first + length] = answer.detach()[0, :, :length].transpose(0, 1)
            if records:
                ctx.parts.append((mine, answer))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, slope = sum(ctx.lengths), grads[0]
        whole: list[Tensor] = []
        for (first, length), (mine, answer) in zip(_places(ctx.lengths), ctx.parts, strict=True):
            there = slope.new_zeros(window(length), *slope.shape[1:])
            there[:length] = slope[first : first + length]
            found = torch.autograd.grad(answer, mine, there.transpose(0, 1)[None])
            if not whole:
                whole = [one.new_empty(total, one.shape[1], one.shape[3]) for one in found]
            for all_of, one in zip(whole, found, strict=True):
                all_of[first : first + length] = one[0, :, :length].transpose(0, 1)
        ctx.parts = []
        return *whole, None, None, None


def _places(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, length) of each sequence."""
    return zip(accumulate(lengths, initial=0), lengths, strict=False)


def _reaching(parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Lengthen the rows by zeros to where the last windows reach."""
    reach = max(first + window(length) for first, length in _places(lengths))
    missing = reach - sum(lengths)
    return [F.pad(part, (0, 0, 0, 0, 0, missing)) if missing > 0 else part for part in parts]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
