"""The watchers of one running engine: each returns the fault that it found, or never."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import aiohttp

from agentrl.engine.admin import PROBE_PATH, EngineAdmin
from agentrl.engine.faults import LogReader
from agentrl.engine.process import EngineProcess
from agentrl.engine.progress import Delivery, Load, Progress
from agentrl.engine.proof import EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault
from agentrl.engine.scrape import EngineNumbers, numbers
from agentrl.engine.watch_log import watch_exit, watch_log

LOAD_EVENT_S = 1.0
METRICS_EVERY_S = 10.0
"""Of the event; scrapes are more."""
SCRAPES = 4
"""In hang_s."""
PROBES = 5
"""In hang_s, where they are answered at once."""
CLOCK_SET_S = 0.5
FAILING_PROBES = 3
"""In a row that end an engine whose scheduler moves on but which answers nobody."""
NO_ANSWER = (aiohttp.ClientError, TimeoutError)


@dataclass(slots=True, eq=False)
class Watch:
    """Over one life of one engine, once it is up."""

    weights: EngineWeights
    process: EngineProcess
    reports: Reports
    hang_s: float
    compile_s: float
    """Longest that compiling kernels excuses."""
    log: LogReader
    wall: Callable[[], float] = time.time
    progress: Progress = field(init=False)
    _load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        # four periods: so much later than the last token may its sample, and ours, be
        self.progress = Progress(
            limit_s=max(self.hang_s - 4 * self.period_s, self.hang_s / 2),
            interval_cap_s=4 * self.period_s,
            answer_s=self.hang_s / 2,
        )

    @property
    def period_s(self) -> float:
        return min(max(self.hang_s / 20, 0.05), 0.5)

    @property
    def admin(self) -> EngineAdmin:
        return self.weights.admin

    def watchers(self) -> list[Coroutine[None, None, Fault]]:
        return [
            watch_exit(self.process, self.log),
            watch_log(self.process, self.log),
            self.watch_progress(),
            self.watch_health(),
            self.watch_metrics(),
        ]

    async def watch_progress(self) -> Fault:
        """Sample the load; an answer that does not come in time is a sample too."""
        told, excused_s, took = 0.0, 0.0, 0.0
        while True:
            await asyncio.sleep(max(self.period_s - took, 0.0))
            asked = time.monotonic()
            load = await self._sample()
            at = time.monotonic()
            took = at - asked
            if self.weights.is_paused:
                if self.progress.sample_paused(at, load):
                    return self._hang(load)
                continue
            found = self.progress.sample(at, load)
            if not found:
                if load is not None and at - told >= LOAD_EVENT_S:
                    self.reports.state(self.weights.name, "load", self.weights.version, load=load)
                    told = at
                continue
            if found == "unresponsive":
                return self._unresponsive()
            if excused_s < self.compile_s and self.process.is_compiling():
                excused_s += self.progress.stalled_s
                self.progress.excuse()
                continue
            return self._hang(load)

    async def _sample(self) -> Load | None:
        try:
            self._load = await self.admin.load(timeout_s=2 * self.period_s)
        except NO_ANSWER:
            return None
        return self._load

    def _hang(self, load: Load | None) -> Fault:
        known = self._load
        silent = "" if load is not None else "; it does not answer /v1/loads either"
        return Fault(
            cause="hang",
            detail=(
                f"no sign of progress for {self.progress.stalled_s:.1f} s (engine.hang_s="
                f"{self.hang_s:g}) with {known.running} requests running and {known.waiting} "
                f"waiting{silent}"
            ),
        )

    def _unresponsive(self) -> Fault:
        return Fault(
            cause="unresponsive",
            detail=(
                f"{self.admin.url}{PROBE_PATH} is not answered for "
                f"{self.progress.unanswered_s:.1f} s (engine.hang_s={self.hang_s:g}) in which the "
                "scheduler moved on and had nothing to do: what carries its answers out has stopped"
            ),
        )

    async def watch_health(self) -> Fault:
        """Send a generate probe now and then; one that an exchange overlapped says nothing."""
        failed = 0
        while True:
            await asyncio.sleep(self.hang_s / PROBES)
            if self.weights.is_paused:
                continue
            self.progress.probe(time.monotonic())
            said = await self._probe()
            self.progress.probed(is_ok=said == "")
            failed = failed + 1 if said else 0
            if said and failed >= FAILING_PROBES:
                return Fault(
                    cause="unresponsive",
                    detail=f"{self.admin.url}{PROBE_PATH} {failed} times in a row: {said}",
                )

    async def _probe(self) -> str | None:
        """Return why it failed, empty if it passed, None once it says nothing.

        So it does when an exchange overlaps it, and when this machine's clock is set: SGLang tells
        by that whether something came since.
        """
        exchanges, ahead_s = self.weights.exchanges, self.wall() - time.monotonic()
        asked = asyncio.create_task(self.admin.is_healthy(timeout_s=self.hang_s))
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=self.period_s)
                is_set = abs(self.wall() - time.monotonic() - ahead_s) > CLOCK_SET_S
                if is_set or self.weights.is_paused or exchanges != self.weights.exchanges:
                    return None
            return "" if await asked else "does not answer 200"
        except NO_ANSWER as error:
            return f"{type(error).__name__} {error}".strip()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def watch_metrics(self) -> Fault:
        """Scrape, tell of it now and then, and see that tokens come out."""
        delivery, told = Delivery(), -METRICS_EVERY_S
        while True:
            with contextlib.suppress(*NO_ANSWER):
                found = numbers(await self.admin.metrics())
                at = time.monotonic()
                if at - told >= METRICS_EVERY_S:
                    self.reports.metrics(self.weights.name, found)
                    told = at
                if delivery.sample(passes=found.decode_passes, delivered=found.delivered):
                    return self._undelivered(found)
            await asyncio.sleep(min(self.hang_s / SCRAPES, METRICS_EVERY_S))

    def _undelivered(self, found: EngineNumbers) -> Fault:
        return Fault(
            cause="unresponsive",
            detail=(
                f"{found.running:.0f} requests run, and no token of theirs comes out, as /metrics "
                f"of {self.admin.url} counts them (engine.hang_s={self.hang_s:g}): what carries "
                "its answers out has stopped"
            ),
        )


async def first_fault(watchers: list[Coroutine[None, None, Fault]]) -> Fault:
    """Return what comes first; end the other watchers."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
