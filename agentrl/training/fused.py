"""Elementwise arithmetic as one kernel: compiled on a GPU, CUDA or ROCm, and plain elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let torch.compile make one kernel of `function`, and one of its backward, on a GPU.

    Compiled once for any number of rows. Its arguments are tensors only.
    """
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*tensors: Tensor) -> Tensor:
        return compiled(*tensors) if tensors[0].is_cuda else function(*tensors)

    return call


@fused
def turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each head's halves by the angles of its row's position. Source: arXiv:2104.09864.

    states: [rows, groups, heads, dim]; cosines, sines: [rows, dim / 2], float32.
    """
    first, second = states.float().chunk(2, -1)
    cos, sin = cosines[:, None, None], sines[:, None, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(states.dtype)


@fused
def turned_norm(
    states: Tensor, weight: Tensor, eps: Tensor, cosines: Tensor, sines: Tensor
) -> Tensor:
    """RMS-normalise each head, scale it by `weight` [dim], then turn it. eps: a number."""
    wide = states.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    first, second = (wide * scale * weight.float()).chunk(2, -1)
    cos, sin = cosines[:, None, None], sines[:, None, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(states.dtype)
