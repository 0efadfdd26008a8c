from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.training import grpo

finite = st.floats(-50, 50, allow_nan=False).map(lambda x: round(x, 3))
rewards = st.lists(finite, min_size=2, max_size=12)


def test_advantages_of_a_known_group():
    found = grpo.group_advantages([1, 0, 0, 1])
    assert found.tolist() == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239])
    assert grpo.group_advantages([1, 0, 0, 0], std_normalize=False).tolist() == [0.75] + [-0.25] * 3


def test_equal_rewards_and_noise_give_zeros():
    assert grpo.group_advantages([0.3, 0.3, 0.3]).tolist() == [0, 0, 0]
    assert grpo.group_advantages([0.3, 0.3 + 1e-9]).tolist() == [0, 0]


def test_a_single_attempt_cannot_be_compared():
    with pytest.raises(ValueError, match="needs 2 or more"):
        grpo.group_advantages([1.0])


@given(rewards, finite)
def test_a_shift_of_all_rewards_changes_nothing(values, shift):
    moved = grpo.group_advantages([value + shift for value in values])
    assert torch.allclose(moved, grpo.group_advantages(values), atol=1e-6)


@given(rewards, st.floats(0.5, 20))
def test_normalised_advantages_do_not_depend_on_scale(values, scale):
    if max(values) - min(values) < 0.01:
        return
    scaled = grpo.group_advantages([value * scale for value in values])
    assert torch.allclose(scaled, grpo.group_advantages(values), atol=1e-3)


@given(rewards, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(values, normalize):
    found = grpo.group_advantages(values, std_normalize=normalize)
    assert abs(float(found.sum())) < 1e-6
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))


def surrogate(ratio: float, advantage: float) -> float:
    return float(
        grpo.clipped_surrogate(
            torch.tensor([math.log(ratio)]),
            torch.zeros(1),
            torch.tensor([advantage]),
            clip_low=0.2,
            clip_high=0.28,
        )
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.28),  # too high and good: clipped
        (0.5, 1.0, -0.5),  # too low and good: pulled back up
        (1.5, -1.0, 1.5),  # too high and bad: pushed down
        (0.5, -1.0, 0.8),  # low enough and bad: clipped
    ],
)
def test_the_surrogate_at_known_ratios(ratio, advantage, loss):
    assert surrogate(ratio, advantage) == pytest.approx(loss, rel=1e-5)


@given(st.floats(0.05, 5), finite)
def test_the_clip_only_ever_makes_the_loss_larger(ratio, advantage):
    assert surrogate(ratio, advantage) >= -ratio * advantage - 1e-3


def test_on_policy_gradient_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5])
    loss = grpo.clipped_surrogate(
        logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_clip_fraction_counts_only_tokens_whose_gradient_is_cut():
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    found = grpo.clip_fraction(logprobs, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.28)
    assert float(found) == pytest.approx(2 / 5)


def test_importance_weights_are_capped_above_only_and_carry_no_gradient():
    old = torch.tensor([math.log(4.0), math.log(0.1)], requires_grad=True)
    weights = grpo.importance_weights(old, torch.zeros(2), cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.1])
    assert not weights.requires_grad
    assert grpo.importance_weights(old, torch.zeros(2), cap=0).tolist() == [1, 1]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_effective_sample_size_is_one_on_policy_and_never_more(ratios):
    square = sum(ratio * ratio for ratio in ratios)
    found = grpo.effective_sample_size(sum(ratios), square, len(ratios))
    assert 1 / len(ratios) - 1e-9 <= found <= 1 + 1e-9
    assert grpo.effective_sample_size(5.0, 5.0, 5) == 1.0


def test_effective_sample_size_of_known_ratios():
    assert grpo.effective_sample_size(4.0, 10.0, 2) == pytest.approx(0.8)
    assert grpo.effective_sample_size(0.0, 0.0, 0) == 0.0


def test_kl_estimators_at_a_known_point():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert float(grpo.kl_divergence(logprobs, reference, "k1")) == 0.5
    assert float(grpo.kl_divergence(logprobs, reference, "k2")) == 0.125
    expected = math.exp(-0.5) - 1 + 0.5
    assert float(grpo.kl_divergence(logprobs, reference, "k3")) == pytest.approx(expected)


def test_k1_and_k3_average_to_the_exact_divergence():
    torch.manual_seed(0)
    p, q = torch.log_softmax(torch.randn(2, 9, dtype=torch.float64), -1)
    exact = float((p.exp() * (p - q)).sum())
    for estimator in ("k1", "k3"):
        mean = float((p.exp() * grpo.kl_divergence(p, q, estimator)).sum())
        assert mean == pytest.approx(exact)


@given(finite, finite)
def test_k2_and_k3_are_never_negative(a, b):
    logprobs, reference = torch.tensor([a / 10]), torch.tensor([b / 10])
    assert float(grpo.kl_divergence(logprobs, reference, "k2")) >= 0
    assert float(grpo.kl_divergence(logprobs, reference, "k3")) >= -1e-6


def test_entropy_of_a_uniform_and_of_a_certain_row():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0]])
    assert grpo.entropy(logits).tolist() == pytest.approx([math.log(4), 0.0])


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=10), st.sampled_from(["token", "trajectory"])
)
def test_the_weights_of_a_step_sum_to_one(counts, aggregation):
    weights = grpo.token_weights(counts, aggregation)
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    assert total == pytest.approx(1.0 if sum(counts) else 0.0)


def test_aggregations_of_a_known_step():
    assert grpo.token_weights([1, 3], "token") == [0.25, 0.25]
    assert grpo.token_weights([1, 3, 0], "trajectory") == pytest.approx([1 / 2, 1 / 6, 0])
