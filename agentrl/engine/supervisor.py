"""Keeps the engines of one node running, and routable only with weights that they proved."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agentrl.config import EngineConfig
from agentrl.engine.admin import EngineAdmin
from agentrl.engine.capabilities import Capabilities
from agentrl.engine.devices import EngineShare
from agentrl.engine.process import EngineProcess, tail
from agentrl.engine.startup import Leased, Start, launch, wait_until_ready
from agentrl.errors import LaunchError, RecordError, VersionError, WaitTimeout
from agentrl.events import EngineFault, EngineState, VersionEvent, Writer, now
from agentrl.weights.version import Announced

RESTART_WINDOW_S = 600.0
LOAD_EVERY_S = 1.0
PROBE_EVERY_S = 5.0
MAX_BACKOFF_S = 10.0
Identity = tuple[int, int, str]
STARTING_MODEL: Identity = (-1, 0, "")
"""Identity of the starting model, before any version was announced."""
FAULTS = (aiohttp.ClientError, TimeoutError, VersionError, RecordError, WaitTimeout, LaunchError)


@dataclass(slots=True, eq=False)
class _Engine:
    index: int
    log: Path
    process: EngineProcess | None = None
    admin: EngineAdmin | None = None
    able: Capabilities | None = None
    loaded: Identity | None = None
    """What it was last told to load."""
    proved: Identity | None = None
    own_checksums: list[dict[str, Any]] | None = None
    """Its answer at the last proof, where its checksum is not ours."""
    restarts: deque[float] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights change."""
    fault: asyncio.Future[tuple[str, str]] | None = None
    """Set by whoever finds it broken: (cause, detail)."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It is routable, or given up."""

    @property
    def name(self) -> str:
        return f"engine-{self.index}"


class EngineSupervisor:
    """Starts `config.count` engines, moves them to announced versions, restarts what breaks.

    An engine that exits, stops answering or fails a proof is killed with its whole process group
    and started anew with the announced weights. More than `config.max_restarts` restarts of one
    engine in ten minutes set `failed`. All methods run on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: Path,
        logs: Path,
        events: Writer,
        unresponsive_s: float = 30.0,
    ) -> None:
        self._config = config
        self._model = model
        self._events = events
        self._unresponsive_s = unresponsive_s
        self._announced: Announced | None = None
        self._engines = [
            _Engine(index=index, log=logs / f"engine-{index}.log") for index in range(config.count)
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.failed: LaunchError | None = None
        """Set once an engine's restart budget is spent."""

    async def start(self, announced: Announced | None) -> None:
        """Start all engines; return when each proved its weights. Raises LaunchError."""
        self._announced = announced
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._keepers = [
            asyncio.create_task(self._keep(engine), name=engine.name) for engine in self._engines
        ]
        await asyncio.gather(*(engine.settled.wait() for engine in self._engines))
        self._raise_if_failed()

    def urls(self) -> list[str]:
        """Return the engines that proved the current version, in a fixed order."""
        return [
            engine.admin.url
            for engine in self._engines
            if engine.admin is not None and engine.proved == self._wanted()
        ]

    def weights(self) -> str:
        """Name the weights that the engines of `urls()` proved, as no others are ever named."""
        attempt, version, checksum = self._wanted()
        return f"{attempt}-{version}-{checksum[:16]}"

    async def update(self, announced: Announced) -> None:
        """Move all engines to `announced`, each on its own; unproved ones stop being routable now.

        Returns when every running engine proved it; one that failed is being restarted with it.
        Raises LaunchError once a restart budget is spent.
        """
        self._announced = announced
        await asyncio.gather(*(self._update_one(engine) for engine in self._engines))
        self._raise_if_failed()

    async def close(self) -> None:
        """Kill all engines and wait for them."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(self._kill(engine) for engine in self._engines))
        for engine in self._engines:
            self._state(engine, "stopped")
        if self._session is not None:
            await self._session.close()

    def _wanted(self) -> Identity:
        return STARTING_MODEL if self._announced is None else self._announced.identity

    def _raise_if_failed(self) -> None:
        if self.failed is not None:
            raise self.failed
        for keeper in self._keepers:
            if keeper.done() and not keeper.cancelled():
                keeper.result()

    async def _keep(self, engine: _Engine) -> None:
        """Live through one engine's lives; afterwards it counts as settled, come what may."""
        try:
            await self._live_and_restart(engine)
        finally:
            engine.settled.set()

    async def _live_and_restart(self, engine: _Engine) -> None:
        while True:
            engine.fault = asyncio.get_running_loop().create_future()
            cause, detail = await self._live(engine, engine.fault)
            engine.proved = None
            await self._kill(engine)
            spent = self._count_restart(engine)
            at = now()
            self._events.write(
                EngineFault(
                    start=at, end=at, engine=engine.name, cause=cause, detail=detail,
                    restarts=len(engine.restarts),
                )
            )  # fmt: skip
            if spent:
                self._give_up(engine, cause, detail)
                return
            await asyncio.sleep(min(0.25 * 2 ** (len(engine.restarts) - 1), MAX_BACKOFF_S))

    async def _live(
        self, engine: _Engine, fault: asyncio.Future[tuple[str, str]]
    ) -> tuple[str, str]:
        """Start, prove and watch one process; return (cause, detail) of its end."""
        try:
            await self._bring_up(engine)
        except (*FAULTS, OSError) as error:
            return _cause(error), str(error)
        engine.settled.set()
        self._state(engine, "ready")
        watchers = [self._watch_exit(engine), self._watch_load(engine), self._watch_health(engine)]
        return await _first(fault, watchers)

    async def _bring_up(self, engine: _Engine) -> None:
        """Start a process and take it to the announced version, were it to change meanwhile."""
        if self._session is None:
            raise RuntimeError("EngineSupervisor is used before start()")
        self._state(engine, "starting")
        announced = self._announced
        with Leased(announced, engine.name):
            start = Start(
                index=engine.index, announced=announced, log=engine.log, share=EngineShare()
            )
            engine.process, ready = await launch(self._config, self._model, start)
            url = await wait_until_ready(
                self._session, engine.process, ready, timeout_s=self._config.start_timeout_s
            )
        admin = EngineAdmin(self._session, url, update_timeout_s=self._config.start_timeout_s)
        engine.able = await admin.capabilities()
        engine.loaded = STARTING_MODEL if announced is None else announced.identity
        engine.own_checksums = None
        async with engine.lock:
            engine.admin = admin
            await self._reach_announced(engine, admin, engine.able)

    async def _update_one(self, engine: _Engine) -> None:
        """Take a running engine to the announced version; a failure ends its process."""
        async with engine.lock:
            if engine.admin is None or engine.able is None:
                return  # starting: it takes what is announced by then
            try:
                await self._reach_announced(engine, engine.admin, engine.able)
            except FAULTS as error:
                if engine.fault is not None and not engine.fault.done():
                    engine.fault.set_result((_cause(error), str(error)))

    async def _reach_announced(
        self, engine: _Engine, admin: EngineAdmin, able: Capabilities
    ) -> None:
        """Load and prove until what is proved is what is announced."""
        while engine.proved != self._wanted():
            announced = self._announced
            engine.proved = None
            if engine.loaded == self._wanted():
                await self._prove(engine, admin, able, announced, message="")
                engine.proved = engine.loaded
                self._told(engine, announced)
            elif announced is not None:
                await self._exchange(engine, admin, able, announced)
            else:
                raise VersionError(
                    f"{engine.name}: asked to go back to the starting model; restart it"
                )

    async def _exchange(
        self, engine: _Engine, admin: EngineAdmin, able: Capabilities, announced: Announced
    ) -> None:
        """Pause, load, prove, continue: nothing is sampled by weights that were not proved."""
        mode = able.pause_mode(self._config.pause_mode)
        self._state(engine, "paused")
        await admin.pause(mode)
        with Leased(announced, engine.name):
            message = await admin.update(
                announced.folder, announced.version, is_flushing=mode != "in_place"
            )
        engine.loaded = announced.identity
        await self._prove(engine, admin, able, announced, message=message)
        await admin.resume()
        engine.proved = announced.identity
        self._told(engine, announced)
        self._state(engine, "ready")

    async def _prove(
        self,
        engine: _Engine,
        admin: EngineAdmin,
        able: Capabilities,
        announced: Announced | None,
        *,
        message: str,
    ) -> None:
        """Compare the engine's own answers with what was announced. Raises VersionError.

        Where the engine hashes as we do, its checksum must be the announced one. SGLang's hashes
        are its own: there the label must fit and the hashes must have changed, which proves that
        some other weights arrived, not which; after a start, the label alone.
        """
        version = 0 if announced is None else announced.version
        found = await admin.weight_version()
        if found != str(version):
            self._refused(engine, version)
            raise VersionError(
                f"{engine.name}: version {version} was announced, it answers {found!r}"
                + (f" and said: {message}" if message else "")
            )
        if announced is None:
            return
        ranks = await admin.checksums()
        wrong = [rank for rank in ranks if rank.get("checksum") != announced.checksum]
        if able.checksum == "equal" and (wrong or not ranks):
            self._refused(engine, version)
            raise VersionError(
                f"{engine.name}: version {version} was announced with checksum "
                f"{announced.checksum}, it holds {[rank.get('checksum') for rank in ranks]}; "
                f"compare {announced.folder} with what the trainer wrote"
            )
        if able.checksum == "own":
            self._prove_change(engine, ranks, version)

    def _prove_change(self, engine: _Engine, ranks: list[dict[str, Any]], version: int) -> None:
        before, engine.own_checksums = engine.own_checksums, ranks
        if before is not None and before == ranks:
            self._refused(engine, version)
            raise VersionError(
                f"{engine.name}: it calls its weights version {version}, but they did not change"
            )

    async def _watch_exit(self, engine: _Engine) -> tuple[str, str]:
        assert engine.process is not None
        code = await engine.process.wait()
        return "exit", f"process {engine.process.pid} ended with {code}"

    async def _watch_load(self, engine: _Engine) -> tuple[str, str]:
        """Sample the load each second; a sample that does not come is the health probe's matter."""
        assert engine.admin is not None
        while True:
            await asyncio.sleep(LOAD_EVERY_S)
            try:
                load = await engine.admin.load()
            except (aiohttp.ClientError, TimeoutError):
                continue
            at = now()
            self._events.write(
                EngineState(
                    start=at, end=at, engine=engine.name, state="load", version=_version(engine),
                    running=load.running, waiting=load.waiting,
                    generated_tokens=load.generated_tokens, busy_s=load.busy_s,
                )
            )  # fmt: skip

    async def _watch_health(self, engine: _Engine) -> tuple[str, str]:
        """Probe the whole engine, except while its weights change (paused engines answer 503)."""
        assert engine.admin is not None
        while True:
            await asyncio.sleep(min(PROBE_EVERY_S, self._unresponsive_s / 2))
            async with engine.lock:
                try:
                    if await engine.admin.is_healthy(timeout_s=self._unresponsive_s):
                        continue
                    return "unresponsive", f"{engine.admin.url}/health does not answer 200"
                except (aiohttp.ClientError, TimeoutError) as error:
                    found = f"{type(error).__name__} {error}".strip()
            return "unresponsive", f"{engine.admin.url}/health: {found}"

    async def _kill(self, engine: _Engine) -> None:
        engine.admin = engine.proved = engine.loaded = None
        if engine.process is not None:
            await engine.process.kill()

    def _count_restart(self, engine: _Engine) -> bool:
        """Note a restart; return whether the budget is spent."""
        at = time.monotonic()
        while engine.restarts and at - engine.restarts[0] > RESTART_WINDOW_S:
            engine.restarts.popleft()
        if len(engine.restarts) >= self._config.max_restarts:
            return True
        engine.restarts.append(at)
        return False

    def _give_up(self, engine: _Engine, cause: str, detail: str) -> None:
        self.failed = LaunchError(
            f"{engine.name} failed again after {len(engine.restarts)} restarts within "
            f"{RESTART_WINDOW_S:.0f} s (engine.max_restarts={self._config.max_restarts}); the last "
            f"time by {cause}: {detail}. Its log {engine.log} ends:\n{tail(engine.log)}"
        )
        self._state(engine, "failed")

    def _state(self, engine: _Engine, state: str) -> None:
        at = now()
        self._events.write(
            EngineState(start=at, end=at, engine=engine.name, state=state, version=_version(engine))
        )

    def _told(self, engine: _Engine, announced: Announced | None) -> None:
        at, version = now(), 0 if announced is None else announced.version
        self._events.write(
            VersionEvent(start=at, end=at, version=version, phase="proved", engine=engine.name)
        )

    def _refused(self, engine: _Engine, version: int) -> None:
        at = now()
        self._events.write(
            VersionEvent(start=at, end=at, version=version, phase="refused", engine=engine.name)
        )


async def _first(
    fault: asyncio.Future[tuple[str, str]],
    watchers: list[Coroutine[Any, Any, tuple[str, str]]],
) -> tuple[str, str]:
    """Return what comes first; end the other watchers."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait([fault, *tasks], return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _version(engine: _Engine) -> int:
    return -1 if engine.proved is None else engine.proved[1]


def _cause(error: BaseException) -> str:
    if isinstance(error, VersionError):
        return "version"
    return "start" if isinstance(error, LaunchError | WaitTimeout | OSError) else "unresponsive"
