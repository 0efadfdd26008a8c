"""Lets megatron-core 0.16.1 run on CPU with gloo. For tests only: it lies to the library.

It shows that conversion, sharding, packing and optimizer wiring are right. It shows nothing of
kernels, bf16, NCCL, Transformer Engine or the all-to-all dispatcher, which does not run on CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class IdleStream:
    """Stands for a CUDA stream or event, on which all work is always done."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> IdleStream:
        return self

    def query(self) -> bool:
        return True


class CudaMeansCpu(TorchFunctionMode):
    """Sends every tensor that is asked for on "cuda" to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to:
            args = [CPU if is_cuda(arg) else arg for arg in args]
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizer asserts "torch.cuda.FloatTensor" before it clips and shards gradients
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def is_cuda(device: object) -> bool:
    """Tell whether a `device` argument means a GPU; a bare number in that place does."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return is_number or (isinstance(device, str) and device.startswith("cuda"))


def install() -> None:
    """Patch torch and megatron-core for the rest of this process."""
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU here: run megatron-core on it")
    torch.cuda.current_device = lambda: CPU
    torch.cuda.current_stream = torch.cuda.default_stream = IdleStream
    torch.cuda.Stream = torch.cuda.Event = IdleStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._set_cuda_rng_state = torch.cuda.set_rng_state
    random._get_cuda_rng_state = torch.cuda.get_rng_state
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = IdleStream()
    CudaMeansCpu().__enter__()
