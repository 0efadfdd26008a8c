"""Sandboxes that are ready before anybody asks: how many, and that each is as good as a new one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, until
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import lease
from agentrl.sandbox.warm import WINDOW_S, Demand, WarmPool


def demand(asked: int, now: float) -> Demand[Any]:
    return Demand(asked=deque(now - WINDOW_S * n / (asked + 1) for n in range(asked, 0, -1)))


@given(st.integers(0, 200), st.floats(0.01, 60))
def test_as_many_are_wanted_as_are_asked_for_while_one_starts(asked: int, start_s: float) -> None:
    target = demand(asked, 1000.0).target(1000.0, start_s)
    assert target - 1 < asked / WINDOW_S * start_s <= target


def test_an_image_that_nobody_asks_for_any_more_wants_none() -> None:
    assert demand(50, 1000.0).target(1000.0 + 2 * WINDOW_S, 10.0) == 0


@pytest.fixture
def box(image: Path, leases: Path) -> Box:
    return Box("process", image, leases)


class Pool:
    """A warm pool of two over a provider, with a clock of its own, that knows what it started."""

    def __init__(self, box: Box, provider: Any) -> None:
        self.box, self.provider = box, provider
        self.started: list[Any] = []
        self.now = 1000.0
        self.warm: WarmPool[Any] = WarmPool(2, self.start, clock=lambda: self.now)

    async def start(self, image: Path) -> Any:
        sandbox = await self.provider.start(image, owner="ready")
        self.started.append(sandbox)  # the pool has it before anything else can run
        return sandbox

    async def fill(self) -> Any:
        """Ask once, say that a start takes a second, and return what is ready from then on."""
        assert await self.warm.take(self.box.image) is None
        self.warm.started(1.0)
        await until(lambda: self.started)
        return self.started[0]


def test_the_next_who_asks_gets_what_was_ready(box: Any) -> None:
    async def body(provider: Any) -> None:
        pool = Pool(box, provider)
        waiting = await pool.fill()
        assert await pool.warm.take(box.image) is waiting
        await pool.warm.close()

    box.provider(body)


def test_one_that_was_lost_while_it_waited_is_given_to_nobody(box: Any) -> None:
    async def body(provider: Any) -> None:
        pool = Pool(box, provider)
        os.kill((await pool.fill()).pid, signal.SIGKILL)
        assert await pool.warm.take(box.image) is None
        await pool.warm.close()

    box.provider(body)


def test_those_of_an_image_that_nobody_asks_for_any_more_make_room(box: Any) -> None:
    async def body(provider: Any) -> None:
        pool = Pool(box, provider)
        await pool.fill()
        pool.now += 2 * WINDOW_S
        pool.warm.started(1.0)
        await until(lambda: owners(box) == [])

    box.provider(body)


def owners(box: Box) -> list[str]:
    claims = [lease.read(path) for path in box.leases.glob("*.json")]
    return sorted(claim.owner for claim in claims if claim)


def test_a_sandbox_that_was_ready_is_leased_to_the_one_who_gets_it(box: Any) -> None:
    async def body(provider: Any) -> None:
        await provider.start(box.image, owner="0/0/0")
        await until(lambda: owners(box) == ["0/0/0", "ready"])  # and it has the only slot
        (other := box.leases.parent / "other" / "testbed").mkdir(parents=True)
        await provider.start(other.parent, owner="0/1/0")  # so by now it is ready
        (waiting,) = [path for path in box.leases.glob("*.json") if "ready" in path.read_text()]
        given = await provider.start(box.image, owner="0/2/0")
        assert json.loads(waiting.read_text())["owner"] == "0/2/0"
        assert (await given.exec("cat a.txt", timeout_s=30)).output == "one\n"

    box.set(warm=1, max_starts=1).provider(body)
    assert list(box.leases.iterdir()) == []


def test_without_a_bound_above_none_nothing_starts_unasked(box: Any) -> None:
    async def body(provider: Any) -> None:
        await provider.start(box.image, owner="0/0/0")
        await asyncio.sleep(0)
        assert owners(box) == ["0/0/0"]

    box.set(warm=0).provider(body)
