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

from agentrl.sandbox.warm import WINDOW_S, Demand


def demand(asked: int, now: float) -> Demand[Any]:
    return Demand(asked=deque(now - WINDOW_S * n / (asked + 1) for n in range(asked, 0, -1)))


@given(st.integers(0, 200), st.floats(0.01, 60))
def test_as_many_are_wanted_as_are_asked_for_while_one_starts(asked: int, start_s: float) -> None:
    target = demand(asked, 1000.0).target(1000.0, start_s)
    assert target - 1 < asked / WINDOW_S * start_s <= target


def test_an_image_that_nobody_asks_for_any_more_wants_none() -> None:
    assert demand(50, 1000.0).target(1000.0 + 2 * WINDOW_S, 10.0) == 0


@pytest.fixture
def pool(image: Path, leases: Path) -> Box:
    return Box("process", image, leases).set(warm=2)


def owners(box: Box) -> list[str]:
    return sorted(json.loads(path.read_text())["owner"] for path in box.leases.glob("*.json"))


async def ready(box: Box, provider: Any) -> Any:
    """Ask for one, and return it once another is ready behind it."""
    first = await provider.start(box.image, owner="0/0/0")
    await until(lambda: owners(box) == ["0/0/0", "ready"])
    await until(lambda: provider._warm._images[box.image].ready)
    return first


def test_the_next_who_asks_gets_one_that_was_ready_under_its_own_name(pool: Any) -> None:
    async def body(provider: Any) -> None:
        await ready(pool, provider)
        (waiting,) = provider._warm._images[pool.image].ready
        assert await provider.start(pool.image, owner="0/1/0") is waiting
        assert {"0/0/0", "0/1/0"} <= set(owners(pool))
        assert (await waiting.exec("cat a.txt", timeout_s=30)).output == "one\n"

    pool.provider(body)
    assert list(pool.leases.iterdir()) == []


def test_one_that_was_lost_while_it_waited_is_given_to_nobody(pool: Any) -> None:
    async def body(provider: Any) -> None:
        await ready(pool, provider)
        (waiting,) = provider._warm._images[pool.image].ready
        os.kill(waiting.pid, signal.SIGKILL)
        given = await provider.start(pool.image, owner="0/1/0")
        assert given is not waiting
        assert (await given.exec("cat a.txt", timeout_s=30)).output == "one\n"

    pool.provider(body)


def test_those_of_an_image_that_is_over_make_room(pool: Any) -> None:
    async def body(provider: Any) -> None:
        await ready(pool, provider)
        provider._warm._images[pool.image].asked.clear()
        provider._warm._settle()
        await until(lambda: owners(pool) == ["0/0/0"])
        assert owners(pool) == ["0/0/0"]

    pool.provider(body)


def test_without_a_bound_above_none_nothing_starts_unasked(pool: Any) -> None:
    async def body(provider: Any) -> None:
        await provider.start(pool.image, owner="0/0/0")
        await asyncio.sleep(0)
        assert owners(pool) == ["0/0/0"]

    pool.set(warm=0).provider(body)
