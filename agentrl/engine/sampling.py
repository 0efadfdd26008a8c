"""Choose the next token of every row at once, each by its own settings and random numbers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in (0, 1) a row, fixed by (seed, position): no state, no order.

    Source: splitmix64 (Steele, Lea, Flood 2014), seed and position as its counter.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) ^ (positions.astype(np.uint64) * _GOLDEN))
    return ((mixed >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32


def sample(
    logits: torch.Tensor,
    *,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    top_k: NDArray[np.int64],
    uniform: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the chosen ids and their log-probabilities, both [rows].

    logits: [rows, vocabulary]. Temperature 0 takes the most likely token. The log-probability
    is log softmax(logits / temperature), before top-p and top-k renormalise, as SGLang's; for
    temperature 0 it is at temperature 1.
    """
    greedy = temperature <= 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature).astype(np.float32))
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    if greedy.all():
        chosen = logprobs.argmax(dim=-1)
    else:
        weights = _truncate(logprobs.exp().double(), top_p, top_k)
        mass = weights.cumsum(dim=-1)
        target = torch.from_numpy(uniform)[:, None] * mass[:, -1:]
        chosen = torch.searchsorted(mass, target, right=True)[:, 0]
        if greedy.any():
            chosen = torch.where(torch.from_numpy(greedy), logprobs.argmax(dim=-1), chosen)
    return chosen.numpy(), logprobs.gather(1, chosen[:, None])[:, 0].numpy()


def _truncate(
    weights: torch.Tensor, top_p: NDArray[np.float32], top_k: NDArray[np.int64]
) -> torch.Tensor:
    """Zero what is outside each row's nucleus and its k likeliest (top_k 0: no bound)."""
    if (top_p >= 1).all() and (top_k <= 0).all():
        return weights
    ordered, index = weights.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    limit = torch.from_numpy(np.where(top_p >= 1, np.inf, top_p).astype(np.float64))
    count = torch.from_numpy(np.where(top_k <= 0, weights.shape[1], top_k))
    inside = (before < limit[:, None]) & (torch.arange(weights.shape[1]) < count[:, None])
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, index, ordered * inside)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
