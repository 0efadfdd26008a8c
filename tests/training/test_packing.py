from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.training.grpo import token_weights
from agentrl.training.packing import Sample, deal, join, pack, padding_share, stack


def sample(length: int, mark: int = 1) -> Sample:
    return Sample(
        tokens=np.full(length, mark, dtype=np.int32),
        loss_mask=np.arange(length) % 2 == 1,
        engine_logprobs=-np.arange(length, dtype=np.float32),
        advantage=float(mark),
        weight=0.5,
    )


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=25)


@given(lengths, st.integers(10, 200))
def test_every_sample_lands_in_exactly_one_micro_batch(sizes, budget):
    samples = [sample(size, mark=index + 1) for index, size in enumerate(sizes)]
    batches = pack(samples, budget)
    marks = [int(row[0]) for batch in batches for row in batch.tokens]
    assert sorted(marks) == list(range(1, len(sizes) + 1))
    assert sum(batch.real_tokens for batch in batches) == sum(sizes)
    assert sum(len(batch.targets) for batch in batches) == sum(s.sampled_tokens for s in samples)


@given(lengths, st.integers(10, 200))
def test_no_micro_batch_passes_the_budget_unless_it_holds_one_sample(sizes, budget):
    for batch in pack([sample(size) for size in sizes], budget):
        assert batch.tokens.numel() <= budget or len(batch.tokens) == 1


def test_a_sample_over_the_budget_is_alone_and_whole():
    batches = pack([sample(5), sample(100), sample(6)], 20)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(1, 100), (2, 6)]


def test_targets_are_the_masked_tokens_and_sources_the_positions_before_them():
    row = Sample(
        tokens=np.array([7, 8, 9, 10], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        engine_logprobs=np.array([0, 0, -1, -2], dtype=np.float32),
        advantage=3.0,
        weight=0.25,
    )
    batch = stack([sample(2, mark=5), row])
    assert batch.targets.tolist() == [5, 9, 10]
    assert batch.source.tolist() == [0, 5, 6]
    assert batch.engine_logprobs.tolist() == [-1, -1, -2]
    assert batch.advantages.tolist() == [5, 3, 3]
    assert batch.weights.tolist() == [0.5, 0.25, 0.25]


def test_the_first_token_is_never_in_the_loss():
    row = Sample(
        tokens=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([True, True]),
        engine_logprobs=np.zeros(2, dtype=np.float32),
        advantage=1.0,
    )
    assert row.sampled_tokens == 1
    assert stack([row]).targets.tolist() == [2]


def test_padding_is_reported():
    assert padding_share(pack([sample(10), sample(5)], 20)) == 0.25
    assert padding_share([]) == 0.0


@given(lengths, st.integers(10, 200), st.integers(1, 4))
def test_packed_rows_hold_every_sample_whole_and_keep_the_budget(sizes, budget, ranks):
    samples = [sample(size, mark=index + 1) for index, size in enumerate(sizes)]
    batches = pack(samples, budget, is_packed=True, ranks=ranks)
    assert padding_share(batches) == 0
    seen = []
    for batch in batches:
        spans = list(pairwise(batch.ends.tolist()))
        assert batch.tokens.numel() <= budget or len(spans) == 1
        seen += [(int(batch.tokens[0, first]), last - first) for first, last in spans]
    assert sorted(seen) == [(index + 1, size) for index, size in enumerate(sizes)]
    assert sum(len(batch.targets) for batch in batches) == sum(s.sampled_tokens for s in samples)


def test_packed_targets_and_sources_stay_within_their_own_sequence():
    batch = join([sample(2, mark=5), sample(4, mark=7)])
    assert batch.targets.tolist() == [5, 7, 7]
    assert batch.source.tolist() == [0, 2, 4]
    assert batch.engine_logprobs.tolist() == [-1, -1, -3]
    assert batch.advantages.tolist() == [5, 7, 7]


def test_packed_micro_batches_are_as_even_as_the_samples_let_them_be():
    sizes = [50, 40, 30, 20, 10, 10, 20, 20]
    batches = pack([sample(size) for size in sizes], 100, is_packed=True, ranks=2)
    assert [batch.real_tokens for batch in batches] == [100, 100]


@given(lengths, st.integers(10, 200), st.integers(1, 5), st.booleans())
def test_ranks_get_as_many_micro_batches_each_and_every_one_once(sizes, budget, ranks, is_packed):
    samples = [sample(size) for size in sizes]
    batches = pack(samples, budget, is_packed=is_packed, ranks=ranks)
    hands = deal(batches, ranks)
    assert len({len(hand) for hand in hands}) == 1
    dealt = [batch for hand in hands for batch in hand if batch.real_tokens]
    assert sorted(map(id, dealt)) == sorted(map(id, batches))
    assert all(hand == sorted(hand, key=lambda batch: -batch.work) for hand in hands)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=15),
    st.integers(5, 150),
    st.integers(1, 4),
    st.sampled_from(["token", "trajectory"]),
    st.booleans(),
)
def test_a_steps_loss_is_the_same_mean_under_any_packing(sizes, budget, ranks, kind, is_packed):
    plain = [sample(size, mark=index + 1) for index, size in enumerate(sizes)]
    weights = token_weights([one.sampled_tokens for one in plain], kind)
    placed = [
        one.placed(i, weight) for i, (one, weight) in enumerate(zip(plain, weights, strict=True))
    ]
    batches = pack(placed, budget, is_packed=is_packed, ranks=ranks)
    # a token's loss is the place of its sample + 1, and its engine_logprob is minus its position
    hands = [batch for hand in deal(batches, ranks) for batch in hand]
    found = sum(float((b.weights * b.advantages * -b.engine_logprobs).sum()) for b in hands)
    losses = [(i + 1) * np.arange(size)[1::2] for i, size in enumerate(sizes)]
    tokens = np.concatenate(losses)
    means = [one.mean() for one in losses if len(one)]
    spread = sum(means) / len(means) if means else 0.0
    wanted = spread if kind == "trajectory" else tokens.mean() if len(tokens) else 0.0
    assert found == pytest.approx(wanted, rel=1e-5)


def test_the_work_of_a_row_grows_faster_than_its_tokens():
    one, two = join([sample(28_000)]), join([sample(14_000), sample(14_000)])
    assert (one.work, two.work) == (84_000, 56_000)
    assert stack([sample(14_000), sample(7_000)]).work == 56_000  # its padding is computed, too


def test_trajectories_of_real_spread_leave_ranks_idle_for_under_a_twentieth():
    rng = np.random.default_rng(0)
    sizes = np.clip(8000 * rng.lognormal(0, 0.8, 512), 500, 65_536).astype(int)
    hands = deal(pack([sample(size) for size in sizes], 65_536, is_packed=True, ranks=8), 8)
    tokens = [sum(batch.real_tokens for batch in hand) for hand in hands]
    works = [sum(batch.work for batch in hand) for hand in hands]
    assert max(tokens) < np.mean(tokens) / 0.95
    assert max(works) < np.mean(works) / 0.95
