"""One micro-batch's loss, gradient and metrics, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.config import TrainingConfig
from agentrl.training.packing import MicroBatch
from agentrl.training.step_loss import Sums, batch_loss, mean_gaps, step_metrics

LOG2 = math.log(2)


def three_tokens() -> MicroBatch:
    """Two of one trajectory, one of another; π/μ will be 1, 4 and ½."""
    none = torch.zeros(3, dtype=torch.int64)
    return MicroBatch(
        tokens=none[None],
        source=none,
        targets=none,
        engine_logprobs=torch.tensor([-1.0, -2 - 2 * LOG2, -0.5 + LOG2]),
        advantages=torch.tensor([2.0, 1.0, -1.0]),
        weights=torch.tensor([0.25, 0.25, 0.5]),
        places=torch.tensor([0, 0, 1]),
        real_tokens=3,
    )


def learned(**changes: object):
    """Return the loss, its gradient and the sums of the three tokens."""
    config = replace(TrainingConfig(importance_cap=2.0), **changes)
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -1.0]) if config.kl_coef else None
    sums, entropy = Sums(), torch.tensor([1.0, 2.0, 3.0])
    loss = batch_loss(logprobs, entropy, three_tokens(), config, sums, reference)
    [gradient] = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), gradient.tolist(), sums


def test_the_loss_is_the_weighted_sum_of_capped_surrogates():
    loss, gradient, _ = learned()
    # −min(ρ, 2) · A: −2, −2, ½; times the weights
    assert loss == pytest.approx(-0.5 - 0.5 + 0.25)
    assert gradient == pytest.approx([-0.5, -0.5, 0.25])


def test_without_a_cap_nothing_is_corrected():
    loss, gradient, sums = learned(importance_cap=0.0)
    assert step_metrics(sums.as_tensor(), has_kl=False)["capped"] == 0
    assert loss == pytest.approx(-0.5 - 0.25 + 0.5)
    assert gradient == pytest.approx([-0.5, -0.25, 0.5])


@pytest.mark.parametrize(
    ("kind", "values", "slopes"),
    [
        ("k1", [0.5, 0, 0.5], [1, 1, 1]),
        ("k2", [0.125, 0, 0.125], [0.5, 0, 0.5]),
        ("k3", [math.exp(-0.5) - 0.5, 0, math.exp(-0.5) - 0.5], [1 - math.exp(-0.5), 0] * 2),
    ],
)
def test_entropy_is_taken_off_and_the_divergence_from_the_start_is_added(kind, values, slopes):
    plain, slope, _ = learned()
    loss, gradient, sums = learned(entropy_coef=0.1, kl_coef=0.2, kl_estimator=kind)
    weights = [0.25, 0.25, 0.5]
    divergence = sum(weight * value for weight, value in zip(weights, values, strict=True))
    assert loss == pytest.approx(plain - 0.1 * (0.25 + 0.5 + 1.5) + 0.2 * divergence)
    added = [0.2 * weight * one for weight, one in zip(weights, slopes, strict=False)]
    assert gradient == pytest.approx([a + b for a, b in zip(slope, added, strict=True)])
    assert step_metrics(sums.as_tensor(), has_kl=True)["kl"] == pytest.approx(sum(values) / 3)


def test_metrics_are_means_over_tokens_and_the_sample_size_is_of_raw_ratios():
    loss, _, sums = learned()
    assert step_metrics(sums.as_tensor(), has_kl=False) == pytest.approx(
        {
            "loss": loss,
            "entropy": 2.0,
            "gap": LOG2,  # of 0, log 4 and log 2
            "ratio": 5.5 / 3,
            "ess": 5.5**2 / (3 * (1 + 16 + 0.25)),
            "capped": 1 / 3,
            "clip_fraction": 0.0,
        }
    )
    assert mean_gaps(sums.gap_sums(3)) == pytest.approx([LOG2, LOG2, 0.0])


def test_two_micro_batches_sum_up_to_one():
    _, _, once = learned()
    _, _, again = learned()
    both = step_metrics(once.as_tensor() + again.as_tensor(), has_kl=False)
    one = step_metrics(once.as_tensor(), has_kl=False)
    assert both.pop("loss") == pytest.approx(2 * one.pop("loss"))
    assert both == pytest.approx(one)
