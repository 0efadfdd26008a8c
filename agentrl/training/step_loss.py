"""A micro-batch's loss and a step's metrics, the same for every back end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentrl.config import TrainingConfig
from agentrl.training import grpo
from agentrl.training.packing import MicroBatch


class Sums:
    """Sums over a step's tokens, float64; they stay on the device until the step asks for them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._gaps = torch.zeros(2, 0, dtype=torch.float64)

    @property
    def samples(self) -> int:
        """As many as gaps are known of."""
        return self._gaps.shape[1]

    def add(self, name: str, values: Tensor) -> None:
        total = values.detach().double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def add_gaps(self, places: Tensor, gaps: Tensor) -> None:
        """Count each token's gap for the sample that it is of. Both [N]; places on the CPU."""
        self._gaps = self._widened(int(places.max()) + 1 if len(places) else 0).to(gaps.device)
        both = torch.stack([gaps.double(), torch.ones_like(gaps, dtype=torch.float64)])
        self._gaps.index_add_(1, places.to(gaps.device), both)

    def gap_sums(self, samples: int) -> Tensor:
        """Return [2, samples] on the CPU: sums of gaps, and tokens; they add up over ranks."""
        return self._widened(samples).cpu()

    def as_tensor(self) -> Tensor:
        """Return the sums in the order of NAMES, on the CPU; they add up over ranks."""
        if not self._sums:
            return torch.zeros(len(NAMES), dtype=torch.float64)
        zero = torch.zeros_like(self._sums["loss"])
        return torch.stack([self._sums.get(name, zero) for name in NAMES]).cpu()

    def _widened(self, samples: int) -> Tensor:
        missing = max(0, samples - self.samples)
        return torch.nn.functional.pad(self._gaps, (0, missing)) if missing else self._gaps


def mean_gaps(gap_sums: Tensor) -> list[float]:
    """Return mean |trainer − engine| of each sample, nats a token."""
    means: list[float] = (gap_sums[0] / gap_sums[1].clamp(min=1)).tolist()
    return means


def step_metrics(summed: Tensor, *, has_kl: bool) -> dict[str, float]:
    """Return a step's metrics from its sums over all ranks: means over its tokens, loss, ESS."""
    sums = dict(zip(NAMES, summed.tolist(), strict=True))
    loss, count = sums.pop("loss"), sums.pop("count")
    ratio, square = sums["ratio"], sums.pop("ratio_square")
    if not has_kl:
        del sums["kl"]
    return {
        "loss": loss,
        "ess": grpo.effective_sample_size(ratio, square, int(count)),
        **{name: value / max(1, count) for name, value in sums.items()},
    }


NAMES = (
    "loss",
    "count",
    "kl",
    "entropy",
    "gap",
    "ratio",
    "ratio_square",
    "capped",
    "clip_fraction",
)


def batch_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: MicroBatch,
    config: TrainingConfig,
    sums: Sums,
    reference: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's share of the step's loss, and count it into `sums`.

    logprobs, entropy, reference (the starting model's log-probabilities): [N], nats.
    """
    old = logprobs.detach()  # one update a step: the policy at its start is the one we have
    engine = batch.engine_logprobs.to(old.device)
    advantages, weights = batch.advantages.to(old.device), batch.weights.to(old.device)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    importance = grpo.importance_weights(old, engine, cap=config.importance_cap)
    per_token = importance * grpo.clipped_surrogate(logprobs, old, advantages, **clips)
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * entropy
    if reference is not None:
        kind: grpo.Estimator = config.kl_estimator  # type: ignore[assignment]
        kl = grpo.kl_divergence(logprobs, reference, kind)
        per_token = per_token + config.kl_coef * kl
        sums.add("kl", kl)
    loss = (weights * per_token).sum()
    ratio = grpo.raw_ratio(old.double(), engine.double())
    sums.add("loss", loss)
    sums.add("entropy", entropy)
    gap = (old - engine).abs()
    sums.add("gap", gap)
    sums.add_gaps(batch.places, gap)
    sums.add("ratio", ratio)
    sums.add("ratio_square", ratio.square())
    sums.add("capped", (ratio > (config.importance_cap or math.inf)).float())
    if len(old):
        clipped = grpo.clip_fraction(old, old, advantages, **clips)
        sums.add("clip_fraction", clipped.expand(len(old)))
    sums.add("count", torch.ones_like(old))
    return loss
