"""Rows of tokens sent to their experts and back, forward and backward without atomics.

    spread: each token's row, once for each expert that has it, in the experts' order
    collect: each token's rows, from wherever they lie, added up

One is the other's backward. Sums are float32 and in a fixed order: a step gives the same bits
again, which scatter_add's do not. On a GPU `collect` is Triton's (rows_kernels): one pass.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Where rows go: n = tokens · k of them."""

    order: Tensor
    """[n], of each place, what lies there, by its number in the flattened [tokens, k]."""
    tokens: Tensor
    """[n], of each place, the token that lies there."""
    places: Tensor
    """[tokens, k], of each token, the places where it lies."""


def way_of(owners: Tensor, owner_count: int) -> Way:
    """Return the way that puts tokens in the order of their owners.

    owners: [tokens, k] int64, which owners each token goes to; within one, tokens keep their order.
    """
    flat = owners.flatten()
    # 16-bit keys sort in a quarter of the passes that 64-bit ones need
    key = flat.to(torch.int16) if owner_count <= 2**15 else flat
    order = key.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return Way(order=order, tokens=order // owners.shape[1], places=places.view(owners.shape))


def spread(rows: Tensor, way: Way) -> Tensor:
    """Return [n, width] of rows [tokens, width]."""
    return cast(Tensor, _Spread.apply(rows, way))  # type: ignore[no-untyped-call]


def collect(rows: Tensor, way: Way) -> Tensor:
    """Return [tokens, width] of rows [n, width]."""
    return cast(Tensor, _Collect.apply(rows, way))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return rows.index_select(0, way.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.way.places), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return _summed(rows, way.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.way.tokens), None


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    """Return, for each row of `places`, the sum of the rows that it names."""
    if rows.is_cuda and _has_triton():
        from agentrl.training import rows_kernels

        return rows_kernels.summed(rows.contiguous(), places)
    return sum_rows(rows, places)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    return rows[places].to(torch.promote_types(rows.dtype, torch.float32)).sum(1).to(rows.dtype)
