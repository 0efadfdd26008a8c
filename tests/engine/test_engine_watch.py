"""The watchers of one engine, over a small server that misbehaves as servers do."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.engine.admin import MAX_METRICS, EngineAdmin, OddAnswer, open_session
from agentrl.engine.capabilities import capabilities
from agentrl.engine.faults import LogReader
from agentrl.engine.process import EngineProcess
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault
from agentrl.engine.scrape import PREFIX
from agentrl.engine.watch import PROBES, Watch, first_fault
from agentrl.engine.watch_log import watch_exit, watch_log
from agentrl.events import NoEvents

LINE = "Memory access fault by GPU node-4 (Agent handle: 0x1) on address 0x7e. Reason: Unknown.\n"
ODD = [
    b"",
    b"<html>busy</html>",
    b"[]",
    b"[" * 100_000,
    b'{"loads": null}',
    b'{"loads": [{"running": 3}]}',
    b'{"loads": [{"num_running_reqs": "many", "num_waiting_reqs": 1e400}]}',
    b"\xff\xfe{}",
]


@dataclass
class Port:
    """What the server says; the load's clock ticks at each answer."""

    running: int = 0
    is_mute: bool = False
    """Probes are not answered until `answers` is set."""
    loads: bytes | None = None
    """Instead of a load."""
    metrics: Callable[[], str] = str
    probes: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    async def load(self, _: web.Request) -> web.Response:
        if self.loads is not None:
            return web.Response(body=self.loads)
        rank = {"num_running_reqs": self.running, "num_waiting_reqs": 0}
        return web.json_response({"loads": [rank | {"timestamp": next(self._clock)}]})

    async def probe(self, _: web.Request) -> web.Response:
        self.probes += 1
        if self.is_mute:
            await self.answers.wait()
        return web.Response()

    async def scrape(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics())


Body = Callable[[Watch], Awaitable[Any]]


def watched(port: Port, folder: Path, body: Body, *, hang_s: float = 4.0) -> Any:
    """Run `body` with a watch over the server and a process that sleeps."""

    async def go() -> Any:
        app = web.Application()
        app.router.add_get("/v1/loads", port.load)
        app.router.add_get("/health_generate", port.probe)
        app.router.add_get("/metrics", port.scrape)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        process = await EngineProcess.start(["sleep", "600"], folder / "log")
        try:
            async with open_session() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                return await body(
                    watch_over(EngineAdmin(session, url, update_timeout_s=30), process)
                )
        finally:
            await process.kill()
            port.answers.set()
            await runner.cleanup()

    def watch_over(admin: EngineAdmin, process: EngineProcess) -> Watch:
        weights = EngineWeights(
            name="engine-0", admin=admin, able=capabilities("0.5.23"), pause_mode="retract",
            reports=Reports(NoEvents()), loaded=STARTING_MODEL,
        )  # fmt: skip
        return Watch(
            weights=weights, process=process, reports=Reports(NoEvents()), hang_s=hang_s,
            compile_s=60.0, log=LogReader(),
        )  # fmt: skip

    return asyncio.run(go())


async def eventually(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not claim():  # noqa: ASYNC110 - a server's counter tells nobody
            await asyncio.sleep(0.01)


async def fault_of(watch: Watch) -> Fault:
    async with asyncio.timeout(60):
        return await first_fault(watch.watchers())


async def well_for(watch: Watch, seconds: float) -> None:
    """Watch for some time; a fault within it is an error."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            pytest.fail(str(await first_fault(watch.watchers())))


@pytest.mark.parametrize("hang_s", [8.0, 10.0, 60.0])
def test_a_stop_just_after_a_probe_passed_is_noticed_within_hang_s(
    tmp_path: Path, hang_s: float
) -> None:
    async def body(watch: Watch) -> None:
        answer_s = 1.0  # SGLang looks once a second whether a probe's answer is there
        samples_s = 2 * (watch.period_s + 0.1)
        waited = answer_s + hang_s / PROBES + watch.progress.answer_s + samples_s
        assert waited < hang_s

    watched(Port(), tmp_path, body, hang_s=hang_s)


def test_an_idle_engine_that_moves_and_answers_no_probe_is_unresponsive(tmp_path: Path) -> None:
    found = watched(Port(is_mute=True), tmp_path, fault_of)
    assert found.cause == "unresponsive"
    assert "the scheduler moved on and had nothing to do" in found.detail


def test_an_engine_whose_tokens_do_not_come_out_is_unresponsive(tmp_path: Path) -> None:
    passes = itertools.count(0, 60)

    def metrics() -> str:
        return (
            f'{PREFIX}cuda_graph_passes_total{{mode="decode_none"}} {next(passes)}\n'
            f"{PREFIX}inter_token_latency_seconds_count 7\n{PREFIX}num_running_reqs 3\n"
        )

    found = watched(Port(running=3, metrics=metrics), tmp_path, fault_of)
    assert found.cause == "unresponsive"
    assert "3 requests run, and no token of theirs comes out" in found.detail


def test_a_probe_that_an_exchange_overlapped_is_asked_anew(tmp_path: Path) -> None:
    port = Port(is_mute=True)

    async def exchange(watch: Watch) -> None:
        await eventually(lambda: port.probes == 1)
        watch.weights.exchanges += 1
        await eventually(lambda: port.probes == 2)
        port.answers.set()

    async def body(watch: Watch) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(exchange(watch))
            tasks.create_task(well_for(watch, 3.0))

    watched(port, tmp_path, body)
    assert port.probes >= 2


@pytest.mark.slow
def test_a_probe_over_which_the_clock_is_set_says_nothing(tmp_path: Path) -> None:
    port, ahead_s = Port(is_mute=True), [0.0]

    async def step(watch: Watch) -> None:
        for count in (1, 2, 3, 4):
            await eventually(lambda count=count: port.probes == count)  # type: ignore[misc]
            ahead_s[0] -= 3600

    async def body(watch: Watch) -> None:
        watch.wall = lambda: time.time() + ahead_s[0]
        watchers = asyncio.create_task(fault_of(watch))
        await step(watch)
        assert not watchers.done()
        assert (await watchers).cause == "unresponsive", "now that nobody sets it"

    watched(port, tmp_path, body)


@pytest.mark.slow
def test_an_engine_whose_load_nobody_understands_lives_by_its_probes(tmp_path: Path) -> None:
    port = Port()

    async def body(watch: Watch) -> None:
        for port.loads in ODD:
            with pytest.raises(OddAnswer):
                await watch.admin.load()
        await well_for(watch, 6.0)

    watched(port, tmp_path, body)


@pytest.mark.slow
def test_metrics_without_end_are_given_up_and_cost_no_engine(tmp_path: Path) -> None:
    async def body(watch: Watch) -> None:
        with pytest.raises(OddAnswer, match=f"over {MAX_METRICS} bytes"):
            await watch.admin.metrics()
        await well_for(watch, 2.0)

    watched(Port(metrics=lambda: "x" * 50_000_000), tmp_path, body)


def test_a_fault_behind_much_log_without_a_line_is_found_at_once(tmp_path: Path) -> None:
    async def body(watch: Watch) -> Fault:
        with watch.process.log.open("a") as log:
            log.write("=" * 20_000_000 + "\n" + LINE)
        async with asyncio.timeout(60):
            return await watch_log(watch.process, watch.log)

    assert watched(Port(), tmp_path, body).cause == "memory_access"


def test_an_end_is_named_by_the_last_line_of_much_log(tmp_path: Path) -> None:
    async def body(watch: Watch) -> Fault:
        with watch.process.log.open("a") as log:
            log.write("all is well\n" * 50_000 + LINE)
        await watch.process.kill()
        return await watch_exit(watch.process, watch.log)

    assert watched(Port(), tmp_path, body).cause == "memory_access"
