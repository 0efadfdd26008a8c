"""What a step must compute, and how fast this device can: model FLOPs utilisation (MFU).

Counted are the model's own products, forward and twice that backward: what is computed again, or on
padding, is no work. Attention is causal. Source: PaLM, appendix B (arXiv:2204.02311).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.errors import ConfigError
from agentrl.hf_shape import ModelShape, read_config, read_shape
from agentrl.training.packing import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Tells a step's speed."""

    shape: ModelShape
    rate: float
    """FLOP/s of all ranks together on a large product; 0: not measured."""

    def speed(self, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
        """Return TFLOP/s and, where the rate is known, the MFU of a step over `samples`."""
        if not seconds:
            return {}
        done = step_flops(self.shape, samples) / seconds
        return {"tflops": done / 1e12, **({"mfu": done / self.rate} if self.rate else {})}


def open_meter(folder: Path, device: torch.device, ranks: int) -> Meter | None:
    """Return the meter of the model in `folder`; None for one whose products we cannot count."""
    try:
        shape = read_shape(read_config(folder))
    except ConfigError:
        return None
    gpus = min(ranks, torch.cuda.device_count())  # fewer where ranks share them
    return Meter(shape=shape, rate=matrix_rate(device) * gpus if device.type == "cuda" else 0.0)


def step_flops(shape: ModelShape, samples: Sequence[Sample]) -> float:
    """Return the operations of forward and backward over `samples`."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys)
    forward = 3 * shape.hidden * shape.inner * (shape.experts_per_token or 1)
    matrices = attention + forward + shape.hidden * shape.experts
    total = 0.0
    for sample in samples:
        length = len(sample.tokens)
        total += shape.layers * (matrices * length + queries * length**2)
        total += shape.hidden * shape.vocabulary * sample.sampled_tokens
    return 6 * total


def matrix_rate(device: torch.device, rounds: int = 10) -> float:
    """Return the device's bfloat16 FLOP/s on an 8192 cube of random numbers."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        left @ right
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return 2 * size**3 / statistics.median(times[3:])
