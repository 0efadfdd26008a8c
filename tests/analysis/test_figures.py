"""Each figure's numbers against runs small enough to count by hand."""

from __future__ import annotations

import csv
import subprocess
import sys
from math import isnan
from pathlib import Path

import pytest
from made_run import BEGIN, Made, make_run, write_summary

from agentrl import events
from analysis import (
    faults,
    sandbox_time,
    solve_rate,
    step_time,
    throughput,
    training_curves,
    trajectory_time,
)
from analysis.report import ALL_FIGURES, FIGURES
from analysis.run_files import load_run

DOCS = Path(__file__).parents[2] / "docs"


def write(folder: Path, *found: events.Event, role: str = "trainer") -> Path:
    writer = events.EventWriter(folder / "events", role, node="a")
    for event in found:
        writer.write(event)
    writer.close()
    return folder


def trajectory(name: str, start: float, end: float, **more: object) -> events.TrajectoryEvent:
    fields = {"draw": 0, "task": "t", "attempt": 0, "cause": "submitted", "reward": 1.0} | more
    return events.TrajectoryEvent(
        trajectory=name,
        start=BEGIN + start,
        end=BEGIN + end,
        **fields,  # type: ignore[arg-type]
    )


def load(engine: str, at: float, busy: float, tokens: int) -> events.EngineState:
    return events.EngineState(
        engine=engine, state="load", start=BEGIN + at, end=BEGIN + at, busy_s=busy,
        generated_tokens=tokens,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", Made(steps=12, resume_at=6))


@pytest.mark.slow
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_writes_png_svg_and_csv_and_says_what_it_shows(figure, made: Path) -> None:
    written = figure.write(load_run(made))
    for kind in ("png", "svg", "csv"):
        assert (made / "report" / f"{figure.name}.{kind}").stat().st_size > 100
    assert written.finding.endswith(".")
    assert "<svg" in written.svg
    assert "<svg" in written.narrow_svg
    assert "nan" not in written.finding


@pytest.mark.parametrize("figure", ALL_FIGURES, ids=lambda figure: figure.name)
def test_every_figure_has_its_picture_in_the_docs(figure) -> None:
    assert f"](analysis/{figure.name}.png)" in (DOCS / "analysis.md").read_text()
    assert (DOCS / "analysis" / f"{figure.name}.png").stat().st_size > 5000


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_of_an_empty_run_says_what_is_missing(figure, tmp_path: Path) -> None:
    written = figure.write(load_run(tmp_path))
    assert (written.svg, written.finding) == ("", figure.missing)


def test_other_time_of_a_step_is_what_its_parts_leave(tmp_path: Path) -> None:
    step = events.Step(
        start=BEGIN, end=BEGIN + 10, step=1, version=1, wait_s=4, logprob_s=1, update_s=3,
        publish_s=0.5, checkpoint_s=0.5,
    )  # fmt: skip
    (row,) = step_time.table(load_run(write(tmp_path, step)))
    assert (row.wait, row.update, row.other, row.total) == (4, 3, 1, 9)
    assert (row.publish, row.checkpoint) == (0.5, 0.5)
    assert step_time.idle_share([row]) == 0.4
    assert "40 % of the time" in step_time.finding([row])


def test_queueing_is_taken_out_of_the_sandbox_start(tmp_path: Path) -> None:
    at = {"trajectory": "0/0/0", "start": BEGIN}
    write(
        tmp_path,
        events.SandboxStart(**at, end=BEGIN + 3, backend="bubblewrap", queued_s=2),
        events.ModelCall(**at, end=BEGIN + 4, engine="e", turn=0, prompt_tokens=1, new_tokens=1),
        events.ToolCall(**at, end=BEGIN + 0.5, turn=0, exit_code=0),
        events.Grade(**at, end=BEGIN + 1, resolved=True),
        trajectory("0/0/0", 0, 10),
        trajectory("0/1/0", 0, 10, cause="sandbox_lost", reward=None),
    )
    (row,) = trajectory_time.table(load_run(tmp_path))
    assert (row.queued, row.sandbox_start, row.model, row.command, row.grade) == (2, 1, 4, 0.5, 1)
    assert (row.other, row.total) == (1.5, 10)


def test_throughput_adds_up_to_what_the_events_say(tmp_path: Path) -> None:
    write(
        tmp_path,
        *(trajectory(f"{i}/0/0", 0, 60 * (i + 1)) for i in range(10)),
        *(load("a", at, at * 0.75, at * 100) for at in range(0, 601, 60)),
        role="inference",
    )
    rows = throughput.table(load_run(tmp_path))
    assert sum(row.trajectories for row in rows) == 10
    assert throughput.per_hour(rows) == pytest.approx(60)
    assert throughput.idle_share(rows) == pytest.approx(0.25)
    assert throughput.tokens_per_s(rows) == pytest.approx(100)
    assert sum(row.concurrent * row.seconds for row in rows) == pytest.approx(60 * 55)


def test_an_engine_that_began_anew_loses_one_interval_and_counts_nothing_negative() -> None:
    states = [
        load("a", 0, 50, 500),
        load("a", 10, 1, 10),
        load("a", 20, 6, 60),
        load("b", 20, 0, 0),
    ]
    (only,) = throughput.intervals(states)
    assert (only.busy_s, only.tokens) == (5, 50)


def test_without_load_samples_the_idle_share_is_unknown_and_said(tmp_path: Path) -> None:
    rows = throughput.table(load_run(write(tmp_path, trajectory("0/0/0", 0, 5))))
    assert isnan(throughput.idle_share(rows))
    assert "idle share is unknown" in throughput.finding(rows)


def test_metrics_that_were_not_logged_are_empty_and_response_length_is_a_mean(
    tmp_path: Path,
) -> None:
    step = events.Step(
        step=1, version=1, wait_s=0, logprob_s=0, update_s=0, publish_s=0, end=BEGIN,
        metrics={"reward": 0.5, "sampled_tokens": 120, "trajectories": 8},
    )  # fmt: skip
    (row,) = training_curves.table(load_run(write(tmp_path, step)))
    assert (row.reward, row.response_tokens) == (0.5, 15)
    assert isnan(row.entropy)
    assert "entropy was not logged" in training_curves.finding([row])


def test_losses_are_counted_by_kind_and_cause(tmp_path: Path) -> None:
    write(
        tmp_path,
        trajectory("0/0/0", 0, 1, cause="engine_lost", reward=None, detail="gone"),
        trajectory("0/1/0", 0, 1, cause="engine_lost", reward=None),
        trajectory("0/2/0", 0, 1),
        events.Drop(what="group", reason="stale", count=3),
        events.EngineFault(engine="e", cause="exit"),
    )
    rows = {(row.kind, row.cause): row.count for row in faults.table(load_run(tmp_path))}
    assert rows == {
        ("lost trajectory", "engine_lost"): 2,
        ("engine fault", "exit"): 1,
        ("drop", "group: stale"): 3,
        ("false zero", "rewards"): 2,
        ("false zero", "groups"): 1,
    }


def test_a_launch_attempt_lasts_from_its_begin_to_its_end(tmp_path: Path) -> None:
    write(
        tmp_path,
        events.LaunchAttempt(attempt=1, phase="begin", reason="started", start=BEGIN),
        events.LaunchAttempt(attempt=1, phase="end", reason="NODE_FAIL", start=BEGIN + 7200),
    )
    (row,) = faults.table(load_run(tmp_path))
    assert (row.cause, row.begin_h, row.end_h) == ("1: started, NODE_FAIL", 0, 2)


@pytest.mark.slow
def test_text_of_a_run_that_looks_like_mathematics_is_drawn(tmp_path: Path) -> None:
    odd = "$\\frac{$ \0 \n 日本 <b>" * 9
    write(
        tmp_path,
        trajectory("0/0/0", 0, 1, cause=odd, reward=None, detail=odd),
        events.SandboxStart(trajectory="0/0/0", backend=odd, start=BEGIN, end=BEGIN + 1),
    )
    run = load_run(tmp_path)
    for module in (faults, sandbox_time):
        written = module.FIGURE.write(run)
        assert "<svg" in written.svg
        assert "<b>" not in written.svg


def test_a_run_without_losses_says_so(tmp_path: Path) -> None:
    write(tmp_path, events.LaunchAttempt(attempt=1, phase="begin", reason="started"))
    assert "Nothing was lost" in faults.finding(faults.table(load_run(tmp_path)))


def test_the_paired_difference_is_over_tasks_that_both_have(tmp_path: Path) -> None:
    write_summary(tmp_path, "sft", "held_out", 0.5, [[False, False], [False, True]])
    write_summary(tmp_path, "rl", "held_out", 0.5, [[True, True], [False, True], [True, True]])
    rows = solve_rate.table(load_run(tmp_path))
    (row,) = [row for row in rows if row.kind == "difference"]
    assert (row.value, row.tasks) == (0.5, 2)
    assert "control for sharpening" in solve_rate.control(rows)


def test_words_tell_whether_intervals_overlap(tmp_path: Path) -> None:
    for name, low, high in (("near", 40, 44), ("far", 20, 90)):
        folder = tmp_path / name
        write_summary(folder, "sft", "held_out", 1.0, [[i < low] for i in range(100)])
        write_summary(folder, "rl", "held_out", 1.0, [[i < high] for i in range(100)])
    said = [solve_rate.verdict(solve_rate.table(load_run(tmp_path / n))) for n in ("near", "far")]
    assert "intervals overlap." in said[0]
    assert "intervals do not overlap." in said[1]


def test_without_a_cooler_temperature_nothing_is_claimed_of_sharpening(tmp_path: Path) -> None:
    write_summary(tmp_path, "sft", "held_out", 1.0, [[True]])
    assert "not told apart from learning" in solve_rate.control(
        solve_rate.table(load_run(tmp_path))
    )


@pytest.mark.slow
def test_a_figure_runs_alone(made: Path) -> None:
    command = [sys.executable, "-m", "analysis.faults", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "launch attempt" in done.stdout
    with (made / "report" / "faults.csv").open() as file:
        assert {"kind", "cause", "count", "hour", "detail"} < set(next(csv.DictReader(file)))
