"""silu(gate) · up · chance of an expert's rows, forward and backward in one pass each on a GPU.

Compiled by torch the backward took three times as long as its memory traffic; Triton's kernels
(gate_kernels) do what the two functions here do, and tests hold them equal.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def gated(both: Tensor, chances: Tensor) -> Tensor:
    """Return [rows, inner] in the dtype of `both`.

    both: [rows, 2 · inner], gate and up side by side; chances: [rows], float32.
    """
    return cast(Tensor, _Gated.apply(both, chances))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, chances: Tensor) -> Tensor:
        ctx.save_for_backward(both, chances)
        return _kernels(both.device.type)[0](both, chances)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        both, chances = ctx.saved_tensors
        return _kernels(both.device.type)[1](both, chances, grads[0].contiguous())


def forward(both: Tensor, chances: Tensor) -> Tensor:
    gate, up = both.to(_wide(both)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up * chances[:, None]).to(both.dtype)


def backward(both: Tensor, chances: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `both` and `chances`."""
    gate, up = both.to(_wide(both)).chunk(2, -1)
    share = torch.sigmoid(gate)
    swish, wide = gate * share, grad.to(gate.dtype)
    scaled = wide * chances[:, None]
    by_gate = scaled * up * share * (1 + gate * (1 - share))
    halves = torch.cat([by_gate, scaled * swish], -1).to(both.dtype)
    return halves, (wide * swish * up).sum(-1).to(chances.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


Forward = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@functools.cache
def _kernels(device: str) -> tuple[Forward, Backward]:
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return forward, backward
    from agentrl.training import gate_kernels

    return gate_kernels.forward, gate_kernels.backward
