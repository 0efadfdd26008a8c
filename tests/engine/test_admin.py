"""What the supervisor asks of an engine, of servers that answer oddly, or only half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from agentrl.engine.admin import EngineAdmin, OddAnswer, open_session
from agentrl.engine.capabilities import capabilities
from agentrl.engine.faults import LogReader
from agentrl.engine.process import EngineProcess
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault
from agentrl.engine.watch import Watch, first_fault
from agentrl.events import EngineMetrics, Event, NoEvents

METRICS = Path(__file__).parent / "fixtures" / "metrics"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[EngineAdmin]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # some handlers never answer
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with open_session() as session:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield EngineAdmin(session, url, update_timeout_s=30)
    await runner.cleanup()


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", "<html>", "", "null"),
        '{"loads": [{}], "ranks": null, "weight_version": null}',
        '{"loads": ["up"], "ranks": ["w"], "weight_version": [1]}',
        '{"loads": [{"num_running_reqs": "many", "num_waiting_reqs": 0}], "ranks": 1}',
    ],
)
def test_an_answer_that_is_none_counts_as_no_answer(text: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text)

    async def go() -> None:
        async with served(handler) as admin:
            for ask in (admin.load, admin.weight_version, admin.checksums):
                with pytest.raises(OddAnswer):
                    await ask()

    asyncio.run(go())


class First(NoEvents):
    def __init__(self) -> None:
        self.found: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def write(self, event: Event) -> None:
        self.found.set_result(event)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_what_an_engine_measures_becomes_an_event(tmp_path: Path, version: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=(METRICS / f"sglang_{version}.txt").read_text())

    async def go() -> Event:
        first = First()
        async with watched(handler, tmp_path, Reports(first)) as watch:
            task = asyncio.create_task(watch.watch_metrics())
            found = await asyncio.wait_for(first.found, 60)
            task.cancel()
            return found

    found = asyncio.run(go())
    assert isinstance(found, EngineMetrics)
    assert (found.running, found.queued, found.generated_tokens) == (41, 3, 91_000)


@asynccontextmanager
async def watched(handler: Handler, folder: Path, reports: Reports) -> AsyncIterator[Watch]:
    """Over a process that does nothing and a server that `handler` is."""
    process = await EngineProcess.start(["sleep", "600"], folder / "log")
    try:
        async with served(handler) as admin:
            weights = EngineWeights(
                name="engine-0", admin=admin, able=capabilities("0.5.23"), pause_mode="retract",
                reports=reports, loaded=STARTING_MODEL,
            )  # fmt: skip
            yield Watch(
                weights=weights, process=process, reports=reports, hang_s=1.0, compile_s=0.0,
                log=LogReader(),
            )  # fmt: skip
    finally:
        await process.kill()


class HalfDead:
    """Its scheduler goes on, its cheap /health says 200, and no request passes through it."""

    steps = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.steps += 1
        if request.path == "/v1/loads":
            busy = {"num_running_reqs": 3, "num_waiting_reqs": 0, "timestamp": self.steps}
            return web.json_response({"loads": [busy]})
        return web.Response(status=200 if request.path == "/health" else 503)


def test_an_engine_that_computes_and_answers_nobody_is_found_though_its_health_says_200(
    tmp_path: Path,
) -> None:
    async def go() -> Fault:
        async with watched(HalfDead().handle, tmp_path, Reports(NoEvents())) as watch:
            return await first_fault([watch.watch_progress(), watch.watch_health()])

    fault = asyncio.run(asyncio.wait_for(go(), 60))
    assert fault.cause == "unresponsive"
    assert "/health_generate 3 times in a row: does not answer 200" in fault.detail
