"""The live view of a run: what it shows, when it ends."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import RunConfig
from agentrl.events import EngineFault, EngineState, EventWriter, Step, TrajectoryEvent
from analysis import summary
from analysis.run_files import load_run
from launch import watch
from launch.run_dir import RunDir, create
from launch.status import Place
from launch.watch import View
from slurm import ledger


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    run = create(RunConfig(name="r", runs_dir=str(odd_path)), ["test"])
    for node in ("0", "1"):
        events = EventWriter(run.path / "events", "inference", node=node)
        events.write(EngineState(engine="engine-0", state="ready", version=3))
        events.write(EngineFault(engine="engine-0", cause="exit", detail="it ended"))
        events.close()
    return run


def shown(view: View, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.screen())
    return console.export_text()


def test_engines_of_all_nodes_are_shown_each_by_its_node(run: RunDir) -> None:
    view = View(run)
    view.look()
    text = shown(view, 100)
    assert "0/engine-0" in text
    assert "1/engine-0" in text
    assert "2, the last: 1/engine-0: exit" in text


def test_the_numbers_are_those_of_the_report(run: RunDir) -> None:
    events = EventWriter(run.path / "events", "trainer", node="0")
    for step in range(1, 13):
        at = 1000.0 * step
        events.write(
            Step(
                step=step, version=step, wait_s=250, logprob_s=50, update_s=600, publish_s=100,
                metrics={"reward": step / 16}, start=at, end=at + 1000,
            )
        )  # fmt: skip
        events.write(
            TrajectoryEvent(
                trajectory=f"{step}/0/0", draw=step, task="t", attempt=0, cause="submitted",
                reward=1.0, start=at, end=at + 1000,
            )
        )  # fmt: skip
    events.close()
    view = View(run)
    view.look()
    numbers: Any = summary.numbers(load_run(run.path))
    told = shown(view, 100)
    assert f"{numbers['throughput']['trajectories_per_hour']:.0f} an hour" in told
    assert (numbers["step_time"]["trainer_idle"], "trainer idle    25 %" in told) == (0.25, True)
    assert f"{numbers['reward']:.3f}, mean of the last steps" in told
    assert view.line().endswith("step 12/100 · 2 engines ready · checkpoint 0 · 2 faults")


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_screen_fits_whatever_terminal_there_is(run: RunDir, width: int) -> None:
    view = View(run)
    view.look()
    view.place = Place(state="running", job="7", components={"trainer": "RUNNING on trn0"})
    assert max(map(len, shown(view, width).splitlines())) <= width


def test_without_a_terminal_a_run_that_has_ended_is_one_line(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.attempt(1) / "logs").mkdir(parents=True)
    line = ledger.LedgerLine(
        attempt=1,
        began="started",
        is_by_person=True,
        ended="saved as asked",
        action="stop",
        code=75,
        step_begin=0,
        step_end=4,
    )
    ledger.append(run.path, line)
    assert watch.main([str(run.path)]) == 0
    [told] = capsys.readouterr().out.splitlines()
    assert told.startswith("r: saved · step 0/100 · 2 engines ready")
