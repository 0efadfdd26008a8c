"""Keeps the engines of one node running, and routable only with weights that they proved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from agentrl.config import EngineConfig
from agentrl.engine import device_memory
from agentrl.engine.admin import open_session
from agentrl.engine.devices import EngineShare, check_shares
from agentrl.engine.keeper import EngineKeeper, Node
from agentrl.engine.proof import identity_of
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault, FaultHistory
from agentrl.errors import LaunchError
from agentrl.events import Writer
from agentrl.weights.version import Announced


class EngineSupervisor:
    """Starts `config.count` engines, moves them to announced versions, restarts what breaks.

    An engine whose log tells of a fault, which exits, hangs, or fails a proof is killed with its
    whole process group and started anew with the announced weights; the others go on. What a
    restart cannot mend, and more than `config.max_restarts` of one engine in ten minutes, set
    `failed`. All methods run on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: Path,
        logs: Path,
        events: Writer,
        shares: Sequence[EngineShare] = (),
        is_quiet: Callable[[], bool] = lambda: False,
        node: int = 0,
    ) -> None:
        """shares: each engine's GPUs and ports; none: they are numbered through from 0.

        is_quiet: whether restarts wait, as while the trainer writes a checkpoint.
        Raises ConfigError for shares that overlap.
        """
        if shares:
            check_shares(shares, engines=config.count, gpus_per_engine=config.gpus_per_engine)
        self._shares = tuple(shares) or tuple(EngineShare() for _ in range(config.count))
        self._node = node
        self._config = config
        self._model = model
        self._logs = logs
        self._reports = Reports(events)
        self._is_quiet = is_quiet
        self._announced: Announced | None = None
        self._keepers: list[EngineKeeper] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.suspect = ""
        """Why this node should be stayed away from; empty: it should not."""

    @property
    def failed(self) -> LaunchError | None:
        """Set once an engine is given up."""
        return next((one.failed for one in self._keepers if one.failed is not None), None)

    async def start(self, announced: Announced | None) -> None:
        """Start all engines; return when each proved its weights. Raises LaunchError."""
        self._announced = announced
        self._session = open_session()
        node = Node(
            index=self._node,
            config=self._config,
            model=self._model,
            logs=self._logs,
            session=self._session,
            reports=self._reports,
            history=FaultHistory(config=self._config),
            wanted=lambda: self._announced,
            is_quiet=self._is_quiet,
            on_suspect=self._on_suspect,
            memory_before=await self._memory(),
        )
        self._keepers = [
            EngineKeeper(index=index, node=node, share=share)
            for index, share in enumerate(self._shares)
        ]
        self._tasks = [asyncio.create_task(one.keep(), name=one.name) for one in self._keepers]
        await asyncio.gather(*(one.settled.wait() for one in self._keepers))
        self._raise_if_failed()

    def urls(self) -> list[str]:
        """Return the engines that proved the current version, in a fixed order."""
        return [url for one in self._keepers if (url := one.url) is not None]

    def members(self) -> dict[str, str]:
        """Return the addresses, by name, of the engines that can take part in a push."""
        return {one.name: one.address for one in self._keepers if one.address}

    def weights(self) -> str:
        """Name the weights that the engines of `urls()` proved, as no others are ever named."""
        attempt, version, checksum = identity_of(self._announced)
        return f"{attempt}-{version}-{checksum[:16]}"

    async def update(self, announced: Announced) -> None:
        """Move all engines to `announced`, each on its own; unproved ones stop being routable now.

        Returns when every running engine proved it; one that failed is being restarted with it.
        Raises LaunchError once a restart budget is spent.
        """
        self._announced = announced
        await asyncio.gather(*(one.update() for one in self._keepers))
        self._raise_if_failed()

    def quarantine(self, reasons: Mapping[str, str]) -> list[str]:
        """End engines whose log-probabilities are far from the trainer's; return their names.

        reasons: by address; one that no engine has any more is passed over. An engine so ended
        starts anew, proved like any other.
        """
        found = [(one, why) for one in self._keepers if (why := reasons.get(one.address, ""))]
        for one, why in found:
            one.report(Fault(cause="drift", detail=why))
        return [one.name for one, _ in found]

    async def close(self) -> None:
        """Kill all engines and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.kill() for one in self._keepers))
        if self._session is not None:
            await self._session.close()
        for one in self._keepers:
            self._reports.state(one.name, "stopped", -1)

    async def _memory(self) -> Mapping[str, int] | None:
        if self._config.kind != "sglang" or self._config.sglang.device == "cpu":
            return None
        return (await device_memory.read()).used_mb

    def _on_suspect(self, reason: str) -> None:
        if not self.suspect:
            self._reports.suspect(reason)
        self.suspect = self.suspect or reason

    def _raise_if_failed(self) -> None:
        if self.failed is not None:
            raise self.failed
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
