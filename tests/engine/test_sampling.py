from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.sampling import sample, uniforms


def draw(
    logits: torch.Tensor, seeds: range, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> np.ndarray:
    rows = len(seeds)
    chosen, _ = sample(
        logits.expand(rows, -1),
        temperature=np.full(rows, temperature, dtype=np.float32),
        top_p=np.full(rows, top_p, dtype=np.float32),
        top_k=np.full(rows, top_k, dtype=np.int64),
        uniform=uniforms(np.array(seeds, dtype=np.uint64), np.zeros(rows, dtype=np.int64)),
    )
    return chosen


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    share = np.bincount(draw(logits, range(40_000), temperature=0.7), minlength=4) / 40_000
    assert np.abs(share - torch.softmax(logits / 0.7, -1)[0].numpy()).max() < 0.01


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draw(logits, range(500), top_p=0.7)) == {0, 1}
    assert set(draw(logits, range(500), top_p=0.01)) == {0}


def test_top_k_keeps_the_likeliest() -> None:
    assert set(draw(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), range(500), top_k=2)) == {1, 2}


def test_log_probabilities_are_those_before_truncation() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    one = np.ones(1, dtype=np.float32)
    _, logprob = sample(
        logits, temperature=one, top_p=one / 9, top_k=np.ones(1, dtype=np.int64),
        uniform=np.array([0.5]),
    )  # fmt: skip
    assert abs(logprob[0] - float(torch.log_softmax(logits, -1)[0, 1])) < 1e-6


def test_temperature_zero_takes_the_likeliest_beside_rows_that_sample() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(2, 1)
    chosen, logprob = sample(
        logits,
        temperature=np.array([0.0, 5.0], dtype=np.float32),
        top_p=np.ones(2, dtype=np.float32),
        top_k=np.zeros(2, dtype=np.int64),
        uniform=np.array([0.999, 0.999]),
    )
    assert chosen.tolist() == [1, 2]
    assert abs(logprob[0] - float(torch.log_softmax(logits, -1)[0, 1])) < 1e-6


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_random_numbers_depend_on_seed_and_position_alone(seed: int, position: int) -> None:
    alone = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
    crowd = uniforms(np.array([1, seed, 2], dtype=np.uint64), np.array([3, position, 4]))
    assert alone[0] == crowd[1]
    assert 0 < alone[0] < 1


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 7] = 0.0
    assert set(draw(logits, range(200))) == {7}
