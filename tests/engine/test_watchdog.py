"""Faults of an engine behind SGLang's command line: found, named, restarted, nothing lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import children, is_gone

from agentrl import events
from agentrl.config import EngineConfig
from agentrl.config_engine import SglangConfig
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.errors import LaunchError
from agentrl.weights.version import Announced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
STAND_IN = Path(__file__).parent / "fixtures" / "sglang_stand_in.py"
SAMPLING = Sampling(max_new_tokens=200, temperature=1.0)
ABORTED = "Memory access fault by GPU node-4 (Agent handle: 0x1) on address 0x7e. Reason: Unknown."
Body = Callable[["Case"], Awaitable[None]]


class Case:
    """A node of stand-ins, its client, and the orders that make them misbehave."""

    def __init__(self, folder: Path, *, device: str = "cpu", **changes: Any) -> None:
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        python.chmod(0o755)
        self.folder = folder
        self.config = EngineConfig(
            **{
                "kind": "sglang",
                "context_length": 256,
                "max_running": 16,
                "hang_s": 8.0,
                "sglang": SglangConfig(
                    python=str(python), device=device, environment={"STAND_IN": str(folder)}
                ),
                **changes,
            }
        )
        self.supervisor: EngineSupervisor
        self.client: EngineClient

    def order(self, name: str, text: str = "") -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_text(text)
        draft.rename(self.folder / name)

    def pids(self) -> list[int]:
        found = [one.process for one in self.supervisor._keepers]
        return [one.pid for one in found if one is not None]

    def starts(self) -> list[str]:
        """The command lines so far, oldest first."""
        paths = sorted(self.folder.glob("arguments-*"), key=lambda path: path.stat().st_mtime)
        return [path.read_text() for path in paths]

    def calls(self, count: int) -> list[asyncio.Task[Generation]]:
        return [
            asyncio.create_task(self.client.generate([at + 1], SAMPLING, trajectory=f"t{at}"))
            for at in range(count)
        ]


async def eventually(claim: Callable[[], bool], what: str) -> None:
    until = asyncio.get_running_loop().time() + 120
    while not claim():
        assert asyncio.get_running_loop().time() < until, f"never came true: {what}"
        await asyncio.sleep(0.02)


def run(
    case: Case, model: Path, body: Body, announced: Announced | None = None, **more: Any
) -> list[events.AnyEvent]:
    """Run `body` with started engines; return the events."""

    async def go() -> None:
        writer = events.EventWriter(case.folder / "events", "inference")
        case.supervisor = EngineSupervisor(
            case.config, model=model, logs=case.folder / "logs", events=writer, **more
        )
        try:
            await case.supervisor.start(announced)
            async with EngineClient(
                case.supervisor.urls, case.config, writer, weights=case.supervisor.weights
            ) as case.client:
                await body(case)
        finally:
            await case.supervisor.close()
            writer.close()

    asyncio.run(go())
    return events.read_folder(case.folder / "events")


def faults(happened: list[events.AnyEvent]) -> list[events.EngineFault]:
    """Those of engines, without the client's."""
    found = [one for one in happened if isinstance(one, events.EngineFault)]
    return [one for one in found if one.cause != "request"]


def is_whole(got: Generation) -> bool:
    return len(got.token_ids) == len(got.logprobs) == SAMPLING.max_new_tokens


@pytest.mark.parametrize("order", ["abort", "line"])
def test_a_fault_line_is_the_cause_and_every_call_is_finished(
    tmp_path: Path, model: Path, order: str
) -> None:
    async def body(case: Case) -> None:
        before, calls = case.pids(), case.calls(12)
        await asyncio.sleep(0.2)
        case.order(order, ABORTED)
        assert all(is_whole(one) for one in await asyncio.gather(*calls))
        await eventually(lambda: set(case.pids()) != set(before), "the fault was noticed")
        await eventually(lambda: len(case.supervisor.urls()) == 2, "both serve again")
        assert len(set(before) & set(case.pids())) == 1, "the other engine was left alone"

    found = faults(run(Case(tmp_path, count=2), model, body))
    assert [one.cause for one in found] == ["memory_access"]
    assert ABORTED in found[0].detail


def test_a_server_that_keeps_its_port_open_and_answers_nobody_is_replaced(
    tmp_path: Path, model: Path
) -> None:
    async def body(case: Case) -> None:
        calls = case.calls(12)
        await asyncio.sleep(0.2)
        case.order("freeze")
        await eventually(lambda: len(case.supervisor.urls()) == 1, "taken out")
        assert all(is_whole(one) for one in await asyncio.gather(*calls))
        await eventually(lambda: len(case.supervisor.urls()) == 2, "both serve again")

    found = faults(run(Case(tmp_path, count=2), model, body))
    assert [one.cause for one in found] == ["hang"]
    assert "does not answer /v1/loads either" in found[0].detail


def test_an_idle_engine_that_stops_is_found_by_the_probe(tmp_path: Path, model: Path) -> None:
    async def body(case: Case) -> None:
        case.order("freeze")
        await eventually(lambda: case.supervisor.urls() == [], "taken out")
        await eventually(lambda: len(case.supervisor.urls()) == 1, "serves again")

    assert [one.cause for one in faults(run(Case(tmp_path), model, body))] == ["hang"]


def test_a_child_that_left_the_group_is_killed_too(tmp_path: Path, model: Path) -> None:
    async def body(case: Case) -> None:
        engine = case.pids()[0]
        case.order("deaf")
        strays: list[psutil.Process] = []

        def started() -> bool:
            strays[:] = children(engine, having="sleep", is_deep=True)
            return bool(strays)

        await eventually(started, "the child was started")
        await eventually(lambda: case.supervisor.urls() == [], "taken out")
        await eventually(lambda: len(case.supervisor.urls()) == 1, "serves again")
        await eventually(lambda: is_gone(strays[0]), "the child was killed")

    run(Case(tmp_path), model, body)


WITHOUT_GRAPHS = "--cuda-graph-backend-decode disabled"


def test_graphs_go_off_after_some_faults_and_come_back_with_nothing_lost(
    tmp_path: Path, model: Path
) -> None:
    async def body(case: Case) -> None:
        for _ in range(2):
            await eventually(lambda: len(case.supervisor.urls()) == 1, "serves")
            os.killpg(case.pids()[0], signal.SIGKILL)
            await eventually(lambda: case.supervisor.urls() == [], "taken out")
        await eventually(lambda: len(case.starts()) > 2, "started anew")
        await eventually(lambda: WITHOUT_GRAPHS not in case.starts()[-1], "graphs are back")
        assert all(is_whole(one) for one in await asyncio.gather(*case.calls(4)))

    case = Case(tmp_path, device="cuda", graph_faults=2, graphs_off_s=30.0)
    happened = run(case, model, body)
    assert any(WITHOUT_GRAPHS in one for one in case.starts()[2:])
    assert [one.graphs for one in faults(happened)] == [True, False]


def test_faults_of_two_engines_make_the_node_a_suspect(tmp_path: Path, model: Path) -> None:
    async def body(case: Case) -> None:
        for pid in case.pids():
            os.killpg(pid, signal.SIGKILL)
        await eventually(lambda: bool(case.supervisor.suspect), "suspect")

    happened = run(Case(tmp_path, count=2, suspect_faults=2), model, body)
    assert [one.reason for one in happened if isinstance(one, events.NodeSuspect)] != []


def test_a_restart_waits_while_the_trainer_writes_a_checkpoint(tmp_path: Path, model: Path) -> None:
    is_saving = [True]

    async def body(case: Case) -> None:
        os.killpg(case.pids()[0], signal.SIGKILL)
        await eventually(lambda: case.supervisor.urls() == [], "taken out")
        await asyncio.sleep(1.5)
        assert len(case.starts()) == 1
        is_saving[0] = False
        await eventually(lambda: len(case.supervisor.urls()) == 1, "serves again")

    run(Case(tmp_path), model, body, is_quiet=lambda: is_saving[0])


def test_an_engine_far_from_the_trainer_is_quarantined(tmp_path: Path, model: Path) -> None:
    async def body(case: Case) -> None:
        far = case.supervisor.urls()[1]
        assert case.supervisor.quarantine({far: "far", "http://gone": "far"}) == ["engine-1"]
        await eventually(lambda: len(case.supervisor.urls()) == 1, "taken out")
        await eventually(lambda: len(case.supervisor.urls()) == 2, "serves again")

    assert [one.cause for one in faults(run(Case(tmp_path, count=2), model, body))] == ["drift"]


def test_another_server_on_its_port_is_never_taken_for_the_engine(
    tmp_path: Path, model: Path
) -> None:
    async def body(case: Case) -> None:
        assert all(is_whole(one) for one in await asyncio.gather(*case.calls(2)))

    case = Case(tmp_path)
    case.order("stranger")
    (found,) = faults(run(case, model, body))
    assert (found.cause, found.restarts) == ("port", 1)
    assert "answered by a server that calls itself 'theirs'" in found.detail


def test_an_interpreter_without_sglang_is_said_at_once(tmp_path: Path, model: Path) -> None:
    async def never(case: Case) -> None:
        raise AssertionError

    sglang = SglangConfig(python=sys.executable, device="cpu")
    with pytest.raises(
        LaunchError, match=r"(?s)would meet the same; the last time by import.*sglang"
    ):
        run(Case(tmp_path, sglang=sglang), model, never)


def test_an_interpreter_that_is_not_there_is_said_at_once(tmp_path: Path, model: Path) -> None:
    async def never(case: Case) -> None:
        raise AssertionError

    sglang = SglangConfig(python=str(tmp_path / "none"), device="cpu")
    with pytest.raises(
        LaunchError, match=r"by import: engine 0: engine\.sglang\.python=.*none is no"
    ):
        run(Case(tmp_path, sglang=sglang), model, never)
