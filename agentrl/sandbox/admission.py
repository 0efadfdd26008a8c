"""Who may start a sandbox now: a slot first, then a rate token, then jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.config import SandboxConfig


class Admission:
    """Lets `slots` starts be under way at once and `per_s` begin a second; 0 is no such bound.

    In that order: a token taken while waiting for a slot would be old when the slot comes, and
    those who held such tokens would then start in one burst.
    """

    def __init__(self, *, slots: int, per_s: float = 0.0, jitter_s: float = 0.0) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._interval_s = 1 / per_s if per_s else 0.0
        self._jitter_s = jitter_s
        self._next = 0.0
        """When the next token is there, on the loop's clock."""

    @classmethod
    def of(cls, config: SandboxConfig) -> Admission:
        return cls(
            slots=config.max_starts, per_s=config.starts_per_s, jitter_s=config.start_jitter_s
        )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold its slot for the length of the block: that of one start."""
        async with self._slots:
            now = asyncio.get_running_loop().time()
            begin, self._next = reserve(self._next, now, self._interval_s)
            wait_s = begin - now + random.uniform(0, self._jitter_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            yield


def reserve(next_at: float, now: float, interval_s: float) -> tuple[float, float]:
    """Return when one who comes `now` may begin, and when the one after may.

    Time in which nobody came is not saved up: there is never a burst.
    """
    begin = max(next_at, now)
    return begin, begin + interval_s
