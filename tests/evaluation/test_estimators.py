from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.estimators import cluster_mean, paired_difference, pass_at_k


@given(st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_solved_one(data):
    attempts = data.draw(st.integers(1, 8))
    solved = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    tries = [True] * solved + [False] * (attempts - solved)
    choices = [any(choice) for choice in combinations(tries, k)]
    found = pass_at_k(np.array([attempts]), np.array([solved]), k)
    assert found[0] == pytest.approx(sum(choices) / len(choices))


def test_pass_at_k_bears_large_numbers():
    assert pass_at_k(np.array([10_000]), np.array([1]), 5_000)[0] == pytest.approx(0.5)


def test_pass_at_k_of_fewer_attempts_is_refused():
    with pytest.raises(ValueError, match="pass@4"):
        pass_at_k(np.array([3]), np.array([1]), 4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        rates = rng.beta(1, 2, size=60)  # a cluster each, of 1 to 4 tasks
        sizes = rng.integers(1, 5, size=60)
        names = np.repeat(np.arange(60), sizes)
        scores = rng.binomial(4, rates[names]) / 4
        found = cluster_mean(scores, [str(name) for name in names], samples=400)
        hits += found.low <= 1 / 3 <= found.high
    assert 0.90 <= hits / 300 <= 0.98


def test_clusters_widen_the_interval_of_tasks_that_go_together():
    scores = np.repeat([0.0, 1.0] * 10, 10)
    apart = cluster_mean(scores, [str(place) for place in range(200)], samples=500)
    together = cluster_mean(scores, [str(place // 10) for place in range(200)], samples=500)
    assert together.high - together.low > 2 * (apart.high - apart.low)
    assert together.value == apart.value == 0.5


def test_no_scores_are_no_estimate():
    with pytest.raises(ValueError, match="no task has a score"):
        cluster_mean(np.array([]), [], samples=10)


def summary(shares):
    return {"per_task": shares, "clusters": {name: name for name in shares}}


def test_a_paired_difference_matches_tasks_and_is_narrower_than_two_intervals():
    rng = np.random.default_rng(0)
    before = {f"t{place}": float(rng.random() < 0.5) for place in range(300)}
    after = {name: min(1.0, share + 0.1) for name, share in before.items()}
    found = paired_difference(summary(before), summary({**after, "only here": 1.0}))
    assert found.tasks == 300
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.02
    assert found.value == pytest.approx(np.mean([v < 1 for v in before.values()]) / 10)


def test_evaluations_without_a_common_task_have_no_difference():
    with pytest.raises(ValueError, match="no graded task in common"):
        paired_difference(summary({"a": 1.0}), summary({"b": 1.0}))
    with pytest.raises(ValueError, match="per_task"):
        paired_difference({}, summary({"b": 1.0}))
