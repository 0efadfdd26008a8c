"""Which engine is quarantined, from gaps of which the truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.drift import FEWEST_DRAWS, Gap, outliers


def gaps(seed: int, level: float, count: int = 40, *, first: int = 0) -> list[Gap]:
    """Sequences of as many draws, two of them a step."""
    found = np.random.default_rng(seed).gamma(16, level / 16, count)
    return [Gap(step=at // 2, draw=at, nats=nats) for at, nats in enumerate(found, first)]


def test_the_engine_that_drifts_is_named_with_both_figures() -> None:
    found = outliers({"a": gaps(1, 0.01), "b": gaps(2, 0.01), "c": gaps(3, 0.4)}, max_drift=8)
    assert list(found) == ["c"]
    assert "nats a token from the trainer's" in found["c"]


def test_of_two_engines_the_one_that_is_far_is_named() -> None:
    assert list(outliers({"a": gaps(1, 0.5), "b": gaps(2, 0.01)}, max_drift=8)) == ["a"]


def test_a_single_engine_is_compared_with_its_own_past() -> None:
    assert list(outliers({"a": gaps(1, 0.01) + gaps(2, 0.5, 16, first=40)}, max_drift=8)) == ["a"]
    assert not outliers({"a": gaps(1, 0.01)}, max_drift=8)


def test_numbers_that_are_none_are_enough() -> None:
    assert list(
        outliers({"a": [Gap(0, 0, 0.01), Gap(0, 1, math.nan)], "b": gaps(2, 0.01)}, max_drift=8)
    ) == ["a"]


def test_when_all_drift_together_it_is_not_the_engines() -> None:
    assert not outliers({name: gaps(at, 0.6) for at, name in enumerate("abcd")}, max_drift=8)


@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(0.0005, 0.02), st.floats(4, 20))
def test_engines_that_are_alike_are_left_alone(
    seed: int, engines: int, level: float, max_drift: float
) -> None:
    alike = {str(at): gaps(seed + at, level) for at in range(engines)}
    assert not outliers(alike, max_drift=max_drift)


@given(st.integers(0, 10_000), st.integers(3, 8), st.floats(1.0, 20.0))
def test_a_corrupt_engine_is_found_and_its_siblings_are_left_alone(
    seed: int, engines: int, level: float
) -> None:
    mixed = {str(at): gaps(seed + at, 0.01) for at in range(engines - 1)}
    assert list(outliers({**mixed, "bad": gaps(seed, level)}, max_drift=8)) == ["bad"]


@given(st.integers(0, FEWEST_DRAWS - 1), st.integers(1, 8))
def test_too_few_draws_say_nothing_however_many_attempts_they_have(
    draws: int, attempts: int
) -> None:
    mine = [gap for gap in gaps(1, 0.9, draws) for _ in range(attempts)]
    assert not outliers({"a": mine, "b": gaps(2, 0.01)}, max_drift=8)


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_that_moves_from_step_to_step_and_by_task_accuses_no_engine(seed: int) -> None:
    """Draw i is node i mod N's, eight attempts of it; steps take two draws and differ widely."""
    random, nodes = np.random.default_rng(seed), 2 + seed % 2
    steps = 0.02 * random.lognormal(0, 1, 40)
    found: dict[str, list[Gap]] = {str(node): [] for node in range(nodes)}
    for draw in range(80):
        level = steps[draw // 2] * random.lognormal(0, 0.6)
        nats = level * random.lognormal(0, 0.3, 8)
        found[str(draw % nodes)] += [Gap(draw // 2, draw, one) for one in nats]
        assert not outliers(found, max_drift=8)
