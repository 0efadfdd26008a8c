"""A slot first, then a rate token, then jitter."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox.admission import Admission, reserve

times = st.floats(0, 1000, allow_nan=False)


def begins(arrivals: list[float], interval_s: float) -> list[float]:
    found, next_at = [], 0.0
    for now in sorted(arrivals):
        begin, next_at = reserve(next_at, now, interval_s)
        found.append(begin)
    return found


@given(st.lists(times, max_size=50), st.floats(0, 10))
def test_no_two_starts_are_closer_than_the_rate_allows(arrivals: list[float], gap: float) -> None:
    found = begins(arrivals, gap)
    assert all(later - earlier >= gap - 1e-9 for earlier, later in pairwise(found))


@given(st.lists(times, max_size=50), st.floats(0, 10))
def test_nobody_begins_before_coming_or_waits_without_need(arrivals: list[float], g: float) -> None:
    found = begins(arrivals, g)
    for index, (now, begin) in enumerate(zip(sorted(arrivals), found, strict=True)):
        assert begin == max(now, found[index - 1] + g if index else 0.0)


@given(st.integers(1, 5), st.integers(1, 30))
def test_slots_bound_the_starts_under_way(slots: int, count: int) -> None:
    under_way, most = 0, 0

    async def one(admission: Admission) -> None:
        nonlocal under_way, most
        async with admission.turn():
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

    async def main() -> None:
        admission = Admission(slots=slots)
        await asyncio.gather(*(one(admission) for _ in range(count)))

    asyncio.run(main())
    assert most == min(slots, count)


def test_a_token_is_taken_only_once_there_is_a_slot() -> None:
    """Else those who waited for the slot would hold old tokens and start at once."""

    async def main() -> list[float]:
        admission, loop = Admission(slots=1, per_s=20), asyncio.get_running_loop()
        began: list[float] = []

        async def one() -> None:
            async with admission.turn():
                began.append(loop.time())
                await asyncio.sleep(0.2 if len(began) == 1 else 0)

        await asyncio.gather(*(one() for _ in range(4)))
        return began

    began = asyncio.run(main())
    assert began[1] - began[0] >= 0.2
    assert began[3] - began[0] >= 0.2 + 2 / 20  # with old tokens: 0.2


def test_starts_that_were_ready_together_are_spread_by_jitter() -> None:
    async def main() -> list[float]:
        admission, loop = Admission(slots=40, jitter_s=0.2), asyncio.get_running_loop()

        async def one() -> float:
            async with admission.turn():
                return loop.time()

        return sorted(await asyncio.gather(*(one() for _ in range(40))))

    began = asyncio.run(main())
    assert began[-1] - began[0] > 0.05


def test_one_that_is_cancelled_while_waiting_gives_its_slot_back() -> None:
    async def main() -> None:
        admission = Admission(slots=1, per_s=2)
        async with admission.turn():
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), admission.turn():
                pass
        async with asyncio.timeout(60), admission.turn():
            pass

    asyncio.run(main())
