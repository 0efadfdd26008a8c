from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.draws import DrawSet, may_start, shard, task_of

small = st.integers(1, 6)


@given(tasks=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 50))
def test_each_epoch_is_a_permutation_of_all_tasks(tasks, seed, epoch):
    draws = range(epoch * tasks, (epoch + 1) * tasks)
    assert sorted(task_of(draw, tasks, seed) for draw in draws) == list(range(tasks))


def test_epochs_and_seeds_differ_and_a_seed_repeats():
    first, second, other = (
        [task_of(draw, 50, seed) for draw in draws]
        for draws, seed in ((range(50), 1), (range(50, 100), 1), (range(50), 2))
    )
    assert first != second != other != first
    assert first == [task_of(draw, 50, 1) for draw in range(50)]


def test_a_draw_of_nothing_is_refused():
    with pytest.raises(ValueError, match="1 task or more"):
        task_of(0, 0, 0)


@given(nodes=small, workers=small)
def test_shards_partition_the_draws(nodes, workers):
    shards = [
        list(islice(shard(node=node, nodes=nodes, worker=worker, workers=workers), 20))
        for node in range(nodes)
        for worker in range(workers)
    ]
    assert sorted(draw for one in shards for draw in one) == list(range(20 * nodes * workers))
    assert all(draw % nodes == place // workers for place, one in enumerate(shards) for draw in one)


@given(st.lists(st.integers(0, 30)), st.integers(0, 40))
def test_a_draw_set_is_a_set(draws, other):
    made, plain = DrawSet(draws), set(draws)
    assert list(made) == sorted(plain)
    assert made.count == len(made) == len(plain)
    assert all((draw in made) == (draw in plain) for draw in range(40))
    assert made.below(other) == sum(draw < other for draw in plain)
    assert made.highest == max(plain, default=-1)
    assert DrawSet.from_ranges(made.to_ranges()) == made
    ranges = made.to_ranges()
    assert all(left[1] + 1 < right[0] for left, right in pairwise(ranges))


@pytest.mark.parametrize("bad", [[[3, 1]], [[0, 5], [5, 6]], [[-1, 0]]])
def test_ranges_out_of_order_are_refused(bad):
    with pytest.raises(ValueError, match="not in order"):
        DrawSet.from_ranges(bad)


@settings(max_examples=40, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    nodes=st.integers(1, 3),
    workers=st.integers(1, 2),
    per_step=st.integers(1, 5),
    staleness=st.integers(0, 2),
)
def test_no_schedule_starts_more_than_the_bound_ahead_nor_stands_still(
    rng, nodes, workers, per_step, staleness
):
    """Any interleaving of starts, finishes and steps, each worker with an outdated view."""
    bound = per_step * (1 + staleness)
    limits = {"groups_per_step": per_step, "max_staleness": staleness}
    shards = [
        shard(node=node, nodes=nodes, worker=worker, workers=workers)
        for node in range(nodes)
        for worker in range(workers)
    ]
    following = [next(one) for one in shards]
    views = [DrawSet() for _ in shards]
    running, finished, consumed = [], [], DrawSet()
    for _ in range(120):
        who = rng.randrange(len(shards) + 2)
        if who < len(shards):
            if rng.random() < 0.5:
                views[who] = DrawSet.from_ranges(consumed.to_ranges())
            if may_start(following[who], views[who], **limits):
                running.append(following[who])
                following[who] = next(shards[who])
        elif who == len(shards) and running:
            finished.append(running.pop(rng.randrange(len(running))))
        elif len(finished) >= per_step:
            for _ in range(per_step):
                consumed.add(finished.pop(0))
        assert len(running) + len(finished) <= bound
    assert len({*running, *finished, *consumed}) == len(running) + len(finished) + len(consumed)
    assert any(may_start(draw, consumed, **limits) for draw in following) or (
        len(running) + len(finished) >= per_step
    )
