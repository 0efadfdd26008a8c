"""What the supervisor asks of an engine, of servers that answer oddly, or only half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
from agentrl.events import NoEvents

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
        process = await EngineProcess.start(["sleep", "600"], tmp_path / "log")
        async with served(HalfDead().handle) as admin:
            watch = Watch(
                weights=weights_of(admin), process=process, reports=Reports(NoEvents()),
                hang_s=1.0, compile_s=0.0, log=LogReader(),
            )  # fmt: skip
            try:
                return await first_fault([watch.watch_progress(), watch.watch_health()])
            finally:
                await process.kill()

    fault = asyncio.run(asyncio.wait_for(go(), 60))
    assert fault.cause == "unresponsive"
    assert "/health_generate 3 times in a row: does not answer 200" in fault.detail


def weights_of(admin: EngineAdmin) -> Any:
    return EngineWeights(
        name="engine-0", admin=admin, able=capabilities("0.5.23"), pause_mode="retract",
        reports=Reports(NoEvents()), loaded=STARTING_MODEL,
    )  # fmt: skip
