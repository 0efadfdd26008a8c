"""Sandboxes that have started before anybody asks: of an image as many as are asked for in a start.

That is Little's law: what comes at a rate, and takes a time to start, needs rate × time of them
ready. So kinds that start at once keep hardly any, and an image that nobody asks for any more none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.errors import InfraError
from agentrl.sandbox.base import Sandbox

S = TypeVar("S", bound=Sandbox)
log = logging.getLogger(__name__)
WINDOW_S = 120.0
"""Over which the rate of asking is taken."""
PROOF_TIMEOUT_S = 10.0
"""Within which one that was ready has to run a command, or another is started."""


@dataclass(kw_only=True, slots=True)
class Demand(Generic[S]):
    """What is known of one image: when it was asked for, and what is ready or on its way."""

    asked: deque[float] = field(default_factory=deque)
    ready: list[S] = field(default_factory=list)
    coming: int = 0

    def target(self, now: float, start_s: float) -> int:
        """Return how many should be ready or on their way; 0 once nobody asks."""
        while self.asked and self.asked[0] < now - WINDOW_S:
            self.asked.popleft()
        return math.ceil(len(self.asked) / WINDOW_S * start_s)


class WarmPool(Generic[S]):
    """At most `most` ready sandboxes over all images; `start` starts one."""

    def __init__(
        self,
        most: int,
        start: Callable[[Path], Awaitable[S]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._start = start
        self._clock = clock
        self._images: dict[Path, Demand[S]] = {}
        self._start_s = 0.0
        """How long starts take, the newer the weightier."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def started(self, seconds: float) -> None:
        """Learn how long a start took."""
        self._start_s = 0.8 * self._start_s + 0.2 * seconds if self._start_s else seconds
        self._settle()

    async def take(self, image: Path) -> S | None:
        """Return a ready one that still runs commands; None when there is none."""
        if not self._most or self._is_closed:
            return None
        demand = self._images.setdefault(image, Demand())
        demand.asked.append(self._clock())
        found = None
        while demand.ready and found is None:
            found = await self._proved(demand.ready.pop(0))
        self._settle()
        return found

    async def close(self) -> None:
        """Begin nothing more, end what was on its way; what is ready is its provider's to close."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _proved(self, sandbox: S) -> S | None:
        is_good = False
        try:
            is_good = (await sandbox.exec("true", timeout_s=PROOF_TIMEOUT_S)).exit_code == 0
        except InfraError as error:
            log.info("a sandbox was lost while it waited: %s", error)
        finally:  # also where this is cancelled
            if not is_good:
                await sandbox.close()
        return sandbox if is_good else None

    def _settle(self) -> None:
        """Close what nobody asks for any more, then begin what is wanted and has room."""
        if self._is_closed:
            return
        now = self._clock()
        for image, demand in list(self._images.items()):
            target = demand.target(now, self._start_s)
            while len(demand.ready) > target:
                self._begin(demand.ready.pop().close())
            if not (demand.asked or demand.ready or demand.coming):
                del self._images[image]
        room = self._most - sum(len(one.ready) + one.coming for one in self._images.values())
        for image, demand in self._images.items():
            short = demand.target(now, self._start_s) - len(demand.ready) - demand.coming
            for _ in range(max(0, min(short, room))):
                demand.coming += 1
                room -= 1
                self._begin(self._add(image, demand))

    async def _add(self, image: Path, demand: Demand[S]) -> None:
        try:
            demand.ready.append(await self._start(image))
        except InfraError as error:
            log.info("no sandbox is ready over %s: %s", image, error)
        finally:
            demand.coming -= 1

    def _begin(self, doing: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(doing))
        task.add_done_callback(self._tasks.discard)
