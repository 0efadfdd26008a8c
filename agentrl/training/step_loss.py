"""A micro-batch's loss and a step's metrics, the same for every back end."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.config import TrainingConfig
from agentrl.training import grpo
from agentrl.training.packing import MicroBatch


class Sums:
    """Sums over a step's tokens, float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {"loss": 0.0, "count": 0.0}
        self._gaps = torch.zeros(2, 0, dtype=torch.float64)

    def add_gaps(self, places: Tensor, gaps: Tensor) -> None:
        """Count each token's gap for the sample that it is of. Both [N]."""
        samples = int(places.max()) + 1 if len(places) else 0
        self.widen(samples)
        both = torch.stack([gaps.double().cpu(), torch.ones(len(gaps), dtype=torch.float64)])
        self._gaps.index_add_(1, places.cpu(), both)

    def widen(self, samples: int) -> Tensor:
        """Return [2, samples]: each sample's sum of gaps and its tokens, to be added over ranks."""
        if (missing := samples - self._gaps.shape[1]) > 0:
            self._gaps = torch.nn.functional.pad(self._gaps, (0, missing))
        return self._gaps

    @property
    def samples(self) -> int:
        return self._gaps.shape[1]

    def gaps(self) -> list[float]:
        """Return mean |trainer − engine| of each sample, nats a token."""
        means: list[float] = (self._gaps[0] / self._gaps[1].clamp(min=1)).tolist()
        return means

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.detach().double().sum())

    def means(self) -> dict[str, float]:
        """Return the step's metrics: means over its tokens, the loss, and the ESS."""
        sums = dict(self._sums)
        loss, count = sums.pop("loss"), sums.pop("count")
        ratio, square = sums.pop("ratio", 0.0), sums.pop("ratio_square", 0.0)
        return {
            "loss": loss,
            "ess": grpo.effective_sample_size(ratio, square, int(count)),
            **{name: value / max(1, count) for name, value in sums.items()},
        }

    @property
    def loss(self) -> float:
        return self._sums["loss"]

    def as_tensor(self) -> Tensor:
        """Return the sums by their sorted names, to be added up over ranks."""
        return torch.tensor([self._sums.get(name, 0.0) for name in NAMES], dtype=torch.float64)

    def take(self, summed: Tensor, *, has_kl: bool) -> None:
        """Replace the sums by those over all ranks."""
        self._sums = dict(zip(NAMES, summed.tolist(), strict=True))
        if not has_kl:
            del self._sums["kl"]


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
    ratio = grpo.raw_ratio(old, engine)
    sums.add("loss", loss)
    sums.add("entropy", entropy)
    gap = (old - engine).abs()
    sums.add("gap", gap)
    sums.add_gaps(batch.places, gap)
    sums.add("ratio", ratio)
    sums.add("ratio_square", ratio.square())
    sums.add("capped", (importance < ratio).float())
    if len(old):
        clipped = grpo.clip_fraction(old, old, advantages, **clips)
        sums.add("clip_fraction", clipped.expand(len(old)))
    sums.add("count", torch.tensor(len(old)))
    return loss
