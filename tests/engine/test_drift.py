"""Which engine is quarantined, from gaps of which the truth is known."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.drift import FEWEST, outliers


def gaps(seed: int, level: float, count: int = 40) -> list[float]:
    return list(np.random.default_rng(seed).gamma(16, level / 16, count))


def test_the_engine_that_drifts_is_named_with_both_figures() -> None:
    found = outliers({"a": gaps(1, 0.01), "b": gaps(2, 0.01), "c": gaps(3, 0.4)}, max_drift=8)
    assert list(found) == ["c"]
    assert "nats a token from the trainer's" in found["c"]


def test_of_two_engines_the_one_that_is_far_is_named() -> None:
    assert list(outliers({"a": gaps(1, 0.5), "b": gaps(2, 0.01)}, max_drift=8)) == ["a"]


def test_a_single_engine_is_compared_with_its_own_past() -> None:
    assert list(outliers({"a": gaps(1, 0.01) + gaps(2, 0.5, 16)}, max_drift=8)) == ["a"]
    assert not outliers({"a": gaps(1, 0.01)}, max_drift=8)


def test_numbers_that_are_none_are_enough() -> None:
    assert list(outliers({"a": [0.01, math.nan], "b": gaps(2, 0.01)}, max_drift=8)) == ["a"]


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


@given(st.integers(0, FEWEST - 1))
def test_too_few_sequences_say_nothing(count: int) -> None:
    assert not outliers({"a": gaps(1, 0.9, count), "b": gaps(2, 0.01)}, max_drift=8)
