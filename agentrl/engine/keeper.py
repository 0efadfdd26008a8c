"""Keeps one engine running: starts, proves and watches it, ends what is faulty, starts anew."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agentrl.config import EngineConfig
from agentrl.engine.admin import EngineAdmin
from agentrl.engine.capabilities import capabilities
from agentrl.engine.device_memory import wait_until_free
from agentrl.engine.devices import EngineShare
from agentrl.engine.faults import LogReader
from agentrl.engine.heads import LostHead
from agentrl.engine.process import EngineProcess, tail
from agentrl.engine.proof import EngineWeights, identity_of
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault, FaultHistory, Verdict
from agentrl.engine.startup import (
    Leased,
    MissingModel,
    MissingServer,
    Ready,
    Start,
    TakenPort,
    launch,
    refuse_stranger,
    wait_until_ready,
)
from agentrl.engine.watch import Watch, first_fault
from agentrl.engine.watch_log import read_on, watch_log
from agentrl.errors import LaunchError, RecordError, VersionError, WaitTimeout
from agentrl.events import now
from agentrl.weights.version import Announced

QUIET_POLL_S = 0.5
MAX_QUIET_S = 600.0
"""Longest that a checkpoint holds a restart back."""
FAULTS = (aiohttp.ClientError, TimeoutError, VersionError, RecordError, WaitTimeout, LaunchError)


@dataclass(frozen=True, kw_only=True)
class Node:
    """What the keepers of one node share."""

    index: int
    config: EngineConfig
    model: Path
    logs: Path
    session: aiohttp.ClientSession
    reports: Reports
    history: FaultHistory
    wanted: Callable[[], Announced | None]
    is_quiet: Callable[[], bool]
    """Whether the trainer writes a checkpoint: no restart then."""
    on_suspect: Callable[[str], None]
    memory_before: Mapping[str, int] | None
    """MiB in use of each GPU before any engine was started."""


@dataclass(eq=False)
class EngineKeeper:
    index: int
    node: Node
    share: EngineShare
    process: EngineProcess | None = None
    weights: EngineWeights | None = None
    """None while it starts and while it is ended."""
    failed: LaunchError | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It is routable, or given up."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights change."""
    _reported: asyncio.Future[Fault] | None = None
    """Set by whoever else finds it faulty."""
    _ready: Ready = field(default_factory=Ready)
    _started_with: Announced | None = None
    _has_graphs: bool = True

    @property
    def name(self) -> str:
        return f"engine-{self.index}"

    @property
    def log(self) -> Path:
        return self.node.logs / f"{self.name}.log"

    @property
    def url(self) -> str | None:
        """Its address, if it proved what is announced."""
        wanted = identity_of(self.node.wanted())
        if self.weights is None or self.weights.proved != wanted:
            return None
        return self.weights.admin.url

    @property
    def address(self) -> str:
        """Its address, proved or not; empty while it has none."""
        return "" if self.weights is None else self.weights.admin.url

    async def keep(self) -> None:
        """Live through one life after the other until given up or cancelled."""
        try:
            while self.failed is None:
                await self._live_once()
        except Exception as error:  # nobody awaits this task; `failed` is what is looked at
            self.failed = LaunchError(f"{self.name}: its watch failed by {error!r}")
            self.failed.__cause__ = error
        finally:
            self.settled.set()

    async def update(self) -> None:
        """Take it to what is announced; a failure ends its process."""
        async with self._lock:
            life = self._reported  # not the next one's, should this one end meanwhile
            if self.weights is None:
                return  # starting: it takes what is announced by then
            try:
                await self.weights.reach(self.node.wanted)
            except FAULTS as error:
                _end(life, Fault(cause=_cause(error), detail=str(error)))

    def report(self, fault: Fault) -> None:
        """End this life for a fault that was found elsewhere."""
        _end(self._reported, fault)

    async def kill(self) -> None:
        self.weights = None
        if self.process is not None:
            await self.process.kill()

    async def _live_once(self) -> None:
        fault = await self._live()
        began = now()
        if fault is None:
            await self._leave_kindly()
            return
        self.weights = None
        verdict = self.node.history.note(self.index, fault, time.monotonic())
        if verdict.suspect:
            self.node.on_suspect(verdict.suspect)
        await self.kill()
        await self._wait_for_memory()
        self.node.reports.fault(self.name, fault, verdict, began=began)
        if verdict.gives_up:
            self._give_up(fault, verdict)
            return
        await asyncio.sleep(verdict.delay_s)
        await self._wait_while_quiet()

    async def _live(self) -> Fault | None:
        """Start, prove and watch one process; return its fault, None to have graphs again."""
        log = LogReader()
        self._reported = asyncio.get_running_loop().create_future()
        try:
            await self._start()
            weights = await self._bring_up(log)
        except (*FAULTS, OSError) as error:
            return await self._fault_of(error, log)
        log.forget()
        self.settled.set()
        self.node.reports.state(self.name, "ready", weights.version)
        assert self.process is not None  # _start set it
        watch = Watch(
            weights=weights,
            process=self.process,
            reports=self.node.reports,
            hang_s=self.node.config.hang_s,
            compile_s=self.node.config.start_timeout_s,
            log=log,
        )
        reported = self._reported
        back = None
        if not self._has_graphs:
            back = self.node.history.graphs_return_in(self.index, time.monotonic()) or 0.0

        async def told() -> Fault:
            return await reported

        try:
            async with asyncio.timeout(back):
                return await first_fault([*watch.watchers(), told()])
        except TimeoutError:
            return None

    async def _start(self) -> None:
        node, announced = self.node, self.node.wanted()
        node.reports.state(self.name, "starting", -1)
        self._started_with = announced
        self._has_graphs = node.history.has_graphs(self.index, time.monotonic())
        start = Start(
            index=self.index,
            announced=announced,
            log=self.log,
            share=self.share,
            graphs=self._has_graphs,
        )
        with Leased(announced, self.name):
            self.process, self._ready = await launch(node.config, node.model, start)

    async def _bring_up(self, log: LogReader) -> EngineWeights:
        """Wait for the started process to answer, and take it to what is announced by then.

        A fault in its log ends the wait: some servers stay, and answer nobody.
        """
        assert self.process is not None  # _start set it
        up = asyncio.create_task(self._answer())
        faulty = asyncio.create_task(watch_log(self.process, log))
        try:
            await asyncio.wait({up, faulty}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                return up.result()
            raise LaunchError(
                f"{self.name}: {faulty.result().detail}; its log {self.log} ends:\n{tail(self.log)}"
            )
        finally:
            for task in (up, faulty):
                task.cancel()
            await asyncio.gather(up, faulty, return_exceptions=True)

    async def _answer(self) -> EngineWeights:
        node, config = self.node, self.node.config
        assert self.process is not None  # _start set it
        announced = self._started_with
        with Leased(announced, self.name):
            url = await wait_until_ready(
                node.session, self.process, self._ready, timeout_s=config.start_timeout_s
            )
        admin = EngineAdmin(node.session, url, update_timeout_s=config.start_timeout_s)
        info = await admin.server_info()
        refuse_stranger(self._ready, info)
        weights = EngineWeights(
            name=self.name,
            admin=admin,
            able=capabilities(str(info.get("version", ""))),
            pause_mode=config.pause_mode,
            reports=node.reports,
            loaded=identity_of(announced),
            node=node.index,
        )
        async with self._lock:
            await weights.reach(node.wanted)
            self.weights = weights
        return weights

    async def _fault_of(self, error: BaseException, log: LogReader) -> Fault:
        """Name a failed start by what its log says, if that says anything."""
        if self.process is not None:
            await read_on(self.process, log)
            log.end()
        cause = _cause(error) if log.cause is None else log.cause.kind
        words = "" if log.cause is None else f"{log.cause.text}; "
        return Fault(cause=cause, detail=f"{words}{error}", unknown_lines=log.unknown.total())

    async def _leave_kindly(self) -> None:
        """End a healthy process: its requests are given back as partial answers first."""
        weights, self.weights = self.weights, None
        if weights is not None:
            # else the kill gives them back too, from their start
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await weights.admin.pause("abort")
        await self.kill()
        await self._wait_for_memory()

    async def _wait_for_memory(self) -> None:
        config = self.node.config
        if not config.is_on_gpus:
            return
        first = self.index * config.gpus_per_engine
        gpus = self.share.gpus or tuple(
            str(gpu) for gpu in range(first, first + config.gpus_per_engine)
        )
        freed = await wait_until_free(gpus, self.node.memory_before, deadline_s=config.gpu_free_s)
        self.node.reports.state(self.name, f"memory {freed.said}", -1)

    async def _wait_while_quiet(self) -> None:
        polls = int(MAX_QUIET_S / QUIET_POLL_S)
        for _ in range(polls):
            if not self.node.is_quiet():
                return
            await asyncio.sleep(QUIET_POLL_S)

    def _give_up(self, fault: Fault, verdict: Verdict) -> None:
        self.failed = LaunchError(
            f"{self.name} is given up: {verdict.gives_up}; the last time by {fault.cause}: "
            f"{fault.detail}. Its log {self.log} ends:\n{tail(self.log)}"
        )
        self.node.reports.state(self.name, "failed", -1)


def _end(life: asyncio.Future[Fault] | None, fault: Fault) -> None:
    if life is not None and not life.done():
        life.set_result(fault)


def _cause(error: BaseException) -> str:
    if isinstance(error, MissingModel | LostHead):
        return "model"
    if isinstance(error, TakenPort):
        return "port"
    if isinstance(error, MissingServer):
        return "import"
    if isinstance(error, VersionError):
        return "version"
    return "start" if isinstance(error, LaunchError | WaitTimeout | OSError) else "unresponsive"
