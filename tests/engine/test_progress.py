"""When an engine counts as hanging: samples of a clock that is moved by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.progress import STREAM_TOKENS, Delivery, Load, Progress

BUSY = Load(running=3, mark=(1.0,))


def fresh(limit_s: float = 10.0) -> Progress:
    return Progress(limit_s=limit_s, interval_cap_s=2.0, answer_s=5.0)


def idle(mark: float) -> Load:
    return Load(mark=(mark,))


def first_hang(progress: Progress, loads: Sequence[Load | None]) -> int | None:
    """Feed one sample a second; return the second of the verdict, which must be a hang."""
    for at, load in enumerate(loads):
        if found := progress.sample(at, load):
            assert found == "hang"
            return at
    return None


def test_a_mark_that_stands_still_while_requests_run_is_a_hang() -> None:
    assert first_hang(fresh(), [BUSY] * 30) == 10


def test_no_answer_is_a_hang_as_well() -> None:
    assert first_hang(fresh(), [BUSY, *[None] * 30]) == 10


def test_an_idle_engine_never_hangs_but_a_probe_is_work() -> None:
    progress = fresh()
    assert first_hang(progress, [idle(1)] * 100) is None
    progress.probe(0)
    assert first_hang(progress, [idle(1)] * 30) is not None


def test_a_probe_that_came_back_is_progress() -> None:
    progress = fresh()
    for at in range(100):
        assert not progress.sample(at, BUSY)
        if at % 5 == 0:
            progress.probe(at)
            progress.probed(is_ok=True)


def test_a_probe_that_an_idle_moving_engine_does_not_answer_is_found_in_half_the_time() -> None:
    progress = fresh()
    progress.sample(0, idle(0))
    progress.probe(0.5)
    found = [progress.sample(at, idle(at)) for at in range(1, 10)]
    assert found.index("unresponsive") == 5, "4.5 s after 5 samples, 5.5 s after 6"


def test_work_and_a_mark_that_stands_still_do_not_count_against_a_probe() -> None:
    progress = fresh()
    progress.probe(0)
    for at in range(1, 40):
        moving = Load(running=at % 8 != 0, mark=(float(at),))
        assert not progress.sample(2 * at, moving)
        assert not progress.sample(2 * at + 1, moving), "a long prompt was begun since"


def test_a_probe_over_which_the_engine_was_paused_says_nothing() -> None:
    progress = fresh()
    progress.probe(0)
    assert not any(progress.sample(at, idle(at)) for at in range(4))
    progress.sample_paused(4, idle(4))
    assert not any(progress.sample(at, idle(at)) for at in range(5, 100))


def test_a_clock_that_stands_still_is_a_hang_without_a_probe() -> None:
    progress = fresh()
    assert first_hang(progress, [*(idle(at) for at in range(9)), *[idle(-1)] * 30]) == 19


def test_a_mark_that_stood_still_while_a_probe_passed_is_no_clock() -> None:
    progress = fresh()
    first_hang(progress, [*(idle(at) for at in range(9)), *[idle(-1)] * 3])
    progress.probe(11)
    progress.probed(is_ok=True)
    assert first_hang(progress, [idle(-1)] * 100) is None


def noticed_after(stopped: str, stop: float, *, busy_until: float) -> float:
    """Seconds from `stop`, as Watch samples and probes for engine.hang_s=10.

    Its SGLang's clock ticks, a probe takes a second, and beside work it passes the detokenizer by.
    """
    progress = Progress(limit_s=8.0, interval_cap_s=2.0, answer_s=5.0)
    sampled, sent, due = 0.0, None, 2.0
    for at in (tick / 10 for tick in range(600)):
        is_silent = stopped == "port" and at >= stop
        reached = busy_until if stopped == "detokenizer" else stop
        if sent is None and at >= due:
            sent = at
            progress.probe(at)
        elif sent is not None and at >= sent + 1 and sent < max(reached, stop) and not is_silent:
            progress.probed(is_ok=True)
            sent, due = None, at + 2
        if at - sampled < (1.0 if is_silent else 0.5):
            continue
        sampled = at
        clock = min(at, stop) if stopped == "scheduler" else at
        is_busy = (stop if stopped == "scheduler" else at) < busy_until
        load = None if is_silent else Load(running=3 * is_busy, mark=(clock,))
        if progress.sample(at, load):
            return at - stop
    return math.inf


@pytest.mark.parametrize("stopped", ["scheduler", "detokenizer", "port"])
@given(st.integers(0, 60), st.integers(-1, 10))
def test_whenever_a_process_stops_it_is_noticed_within_hang_s(
    stopped: str, phase: int, busy: int
) -> None:
    """Of the stop, or for a detokenizer of the end of what its scheduler goes on with."""
    stop = 20 + phase / 10
    end = max(busy / 10, 0) if stopped == "detokenizer" else 0
    assert noticed_after(stopped, stop, busy_until=stop + busy / 10) - end <= 10


def test_passes_without_a_token_at_the_port_are_found_and_few_of_them_are_not() -> None:
    delivery = Delivery()
    assert not delivery.sample(passes=0, delivered=7)
    assert not delivery.sample(passes=5 * STREAM_TOKENS, delivered=7), "it may be under way"
    assert delivery.sample(passes=5 * STREAM_TOKENS, delivered=7)
    assert not delivery.sample(passes=9 * STREAM_TOKENS, delivered=8)
    few = [delivery.sample(passes=10 * STREAM_TOKENS, delivered=8) for _ in range(9)]
    assert not any(few)


def test_a_server_that_does_not_count_what_comes_out_is_not_accused() -> None:
    delivery = Delivery()
    assert not any(delivery.sample(passes=at * STREAM_TOKENS, delivered=0) for at in range(99))


def test_time_in_which_nobody_looked_counts_little() -> None:
    progress = fresh()
    progress.sample(0, BUSY)
    assert not progress.sample(3600, BUSY), "this whole node may have stood still"
    assert progress.stalled_s == 2.0


def test_an_excuse_starts_the_count_anew() -> None:
    progress = fresh()
    first_hang(progress, [BUSY] * 9)
    progress.excuse()
    assert not progress.sample(9, BUSY)


def test_a_paused_engine_need_not_move_but_has_to_answer() -> None:
    progress = fresh()
    assert not any(progress.sample_paused(at, BUSY) for at in range(3600))
    silent = [progress.sample_paused(3600 + at, None) for at in range(60)]
    assert silent.index("hang") == 29, "three limits, counted from the last answer"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_stalls_below_the_limit_are_never_a_hang(stalls: list[int]) -> None:
    loads = [
        Load(running=1, mark=(float(number),))
        for number, stall in enumerate(stalls)
        for _ in range(stall + 1)
    ]
    assert first_hang(fresh(), loads) is None


@given(st.lists(st.integers(0, 9), max_size=40), st.booleans())
def test_a_stall_over_the_limit_is_found_whatever_came_before(
    stalls: list[int], answers: bool
) -> None:
    before = [
        Load(running=1, mark=(float(number),))
        for number, stall in enumerate(stalls)
        for _ in range(stall + 1)
    ]
    stuck = Load(running=1, mark=(-1.0,)) if answers else None
    found = first_hang(fresh(), [*before, *[stuck] * 12])
    assert found is not None
    assert found >= len(before)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_thirty_minutes_of_long_prompts_pauses_and_pushes_raise_no_alarm_and_a_hang_does(
    seed: int,
) -> None:
    """Periods and limits as Watch sets them for engine.hang_s=10; half a second a sample."""
    rng, at, mark = random.Random(seed), 0.0, 0.0
    progress = Progress(limit_s=8.0, interval_cap_s=2.0, answer_s=5.0)
    while at < 1800:
        kind = rng.choice(["decode", "prefill", "pause", "idle", "absent"])
        length = rng.uniform(0.5, {"prefill": 7.5, "pause": 120.0}.get(kind, 30.0))
        until = at + length
        if kind == "absent":  # this process was not run: one late sample
            at = until
        while at < until:
            at += 0.5
            mark += kind == "decode"
            if kind == "pause":
                is_answering = int(at / 0.5) % 40 == 0  # it loads: 20 s of silence at a time
                assert not progress.sample_paused(at, Load() if is_answering else None)
                continue
            running = 0 if kind == "idle" else 40
            assert not progress.sample(at, Load(running=running, mark=(mark,)))
        mark += 1  # the prompt's last chunk came out
        assert not progress.sample(at, Load(running=40, mark=(mark,)))
    last_token = at
    while not progress.sample(at, Load(running=40, mark=(mark,))):
        at += 0.5
    assert at - last_token <= 10
