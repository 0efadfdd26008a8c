"""GRPO in pure functions on tensors, shared by all back ends.

One update a step: π_old is the policy at the step's start, μ the engine that sampled.
Log-probabilities are natural, at the sampling temperature, [N] over the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "trajectory"]
Estimator = Literal["k1", "k2", "k3"]

MOST_NATS = 300.0
EQUAL_REWARDS = 1e-6
"""Rewards nearer than this are equal: noise over a tiny deviation must not become a signal."""


def group_advantages(
    rewards: Sequence[float], *, std_normalize: bool = True, eps: float = 1e-6
) -> Tensor:
    """Score each attempt of a group against the others.

    rewards: [attempts], any scale, ungraded attempts (None) left out before; returns float64
    [attempts]: r − mean, over the unbiased standard deviation + eps when std_normalize.
    Equal rewards give zeros: such a group teaches nothing. Raises ValueError under 2 attempts.
    Source: GRPO outcome supervision, DeepSeekMath §4.1.2 (arXiv:2402.03300); without the deviation:
    Dr. GRPO (arXiv:2503.20783).
    """
    if len(rewards) < 2:
        raise ValueError(f"group of {len(rewards)} graded attempts: needs 2 or more to compare")
    values = torch.tensor(rewards, dtype=torch.float64)
    if float(values.max() - values.min()) <= EQUAL_REWARDS:
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std() + eps) if std_normalize else centred


def clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return PPO's pessimistic loss of each token, to be minimised.

    All [N]; gradient flows through `logprobs` only. r = exp(logprobs − old) is clipped to
    [1 − clip_low, 1 + clip_high]. Where old is logprobs.detach(), r is 1 and the gradient is
    −advantage · ∇logprob. Source: arXiv:1707.06347 eq. 7; separate bounds: DAPO (arXiv:2503.14476).
    """
    ratio = torch.exp(logprobs - old.detach())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def clip_fraction(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the share of tokens, 0 to 1, whose gradient the clip cuts off."""
    ratio = torch.exp(logprobs - old)
    cut = (ratio > 1 + clip_high) & (advantages > 0) | (ratio < 1 - clip_low) & (advantages < 0)
    return cut.float().mean()


def importance_weights(old: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """Return min(π_old/μ, cap) of each token, without gradient; cap 0 gives ones.

    Corrects for sampling by older weights and by another implementation. Truncation bounds the
    variance and biases towards the engine's policy. Source: truncated importance sampling between
    trainer and engine, as in slime and verl (`tis`), cap 2 there too.
    """
    if cap <= 0:
        return torch.ones_like(old)
    return raw_ratio(old, engine).clamp(max=cap)


def raw_ratio(old: Tensor, engine: Tensor) -> Tensor:
    """Return π_old/μ of each token, unclipped, without gradient; at most e^300.

    In float64 any sum of them, and of their squares, is then a number.
    """
    return torch.exp((old - engine).detach().clamp(max=MOST_NATS))


def effective_sample_size(ratio_sum: float, ratio_square_sum: float, count: int) -> float:
    """Return (Σρ)²/(n·Σρ²), 0 to 1, from sums over a whole step: 1 is on-policy.

    Feed it the RAW ratio: clamped weights hide staleness. Source: Kish's design effect.
    """
    return ratio_sum**2 / (count * ratio_square_sum) if count and ratio_square_sum else 0.0


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(π‖π_ref) at each sampled token, nats, [N].

    d = logprobs − reference; k1 = d, unbiased, any sign; k2 = d²/2; k3 = e^(−d) − 1 + d, unbiased,
    never negative. Source: J. Schulman, "Approximating KL divergence", 2020. As losses: the
    gradient of k1 is 0 in the mean, k2's is that of KL(π‖π_ref), k3's that of KL(π_ref‖π), each
    of single tokens (Tang and Munos, arXiv:2506.09477).
    """
    delta = logprobs - reference
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    return torch.expm1(-delta) + delta


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each row, nats. logits: [N, vocabulary], at the temperature; [N]."""
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def token_weights(sampled_tokens: Sequence[int], aggregation: Aggregation) -> list[float]:
    """Return the weight of every sampled token of each trajectory, fixed for the whole step.

    sampled_tokens: counts of ALL the step's trajectories, before they are split into micro-batches.
    A step's loss is Σ weight · token loss over its micro-batches, so how they are split changes
    nothing. `token`: each token counts the same; `trajectory`: each trajectory that sampled
    anything does. The weights of all tokens sum to 1 (or 0, when nothing was sampled).
    """
    if aggregation == "token":
        total = sum(sampled_tokens)
        return [1 / total if total else 0.0] * len(sampled_tokens)
    trajectories = sum(count > 0 for count in sampled_tokens)
    return [1 / (trajectories * count) if count else 0.0 for count in sampled_tokens]
