"""Long tail, caps, GPU-hours, traces, advice and comparisons on runs small enough for a pencil."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import write_summary
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from agentrl import events
from agentrl.errors import RecordError
from analysis import (
    cap_replay,
    compare,
    gpu_hours,
    lanes,
    long_tail,
    page,
    perfetto,
    plot,
    sandbox_time,
    several,
    solve_groups,
    throughput,
    trace,
    what_now,
)
from analysis.report import write_report
from analysis.run_files import load_run
from analysis.window import Window
from launch import report as command

AT = 1_790_000_000.0


def write(folder: Path, *found: events.Event, role: str = "inference") -> Path:
    writer = events.EventWriter(folder / "events", role, node="a")
    for event in found:
        writer.write(event)
    writer.close()
    return folder


def trajectory(attempt: int, end: float, **more: object) -> events.TrajectoryEvent:
    fields = {"cause": "submitted", "reward": 0.0, "turns": 1} | more
    return events.TrajectoryEvent(
        trajectory=f"0/{attempt}/0", draw=0, task="t", attempt=attempt, start=AT, end=AT + end,
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def call(attempt: int, turn: int, end: float, context: int) -> list[events.Event]:
    """Return a model call of nine seconds and a command of one, that ends at `end`."""
    name = f"0/{attempt}/0"
    return [
        events.ModelCall(
            trajectory=name, engine="e", turn=turn, prompt_tokens=context - 10, new_tokens=10,
            start=AT + end - 10, end=AT + end - 1,
        ),
        events.ToolCall(
            trajectory=name, turn=turn, exit_code=0, start=AT + end - 1, end=AT + end
        ),
    ]  # fmt: skip


def test_the_tail_is_what_comes_after_nine_of_ten(tmp_path: Path) -> None:
    write(tmp_path, *(trajectory(i, 10 * (i + 1)) for i in range(9)), trajectory(9, 120))
    rows = long_tail.table(load_run(tmp_path))
    (found,) = long_tail.tails(rows)
    assert (found.t90, found.t100, found.share) == (90, 120, 0.25)
    assert long_tail.tail_share(rows) == 0.25


def test_shares_add_up_seconds_and_not_shares() -> None:
    long, short = long_tail.tail([*range(1, 10), 100]), long_tail.tail([*[1] * 9, 2])
    assert (long.t90, long.t100, short.t90, short.t100) == (9, 100, 1, 2)


def test_a_cap_on_turns_ends_with_the_command_of_its_last_turn(tmp_path: Path) -> None:
    write(
        tmp_path,
        *(event for turn in range(4) for event in call(0, turn, 10 * (turn + 1), 100 * turn + 50)),
        *call(1, 0, 10, 50),
        events.Grade(trajectory="0/0/0", resolved=True, start=AT + 40, end=AT + 42),
        trajectory(0, 42, turns=4, reward=1.0),
        trajectory(1, 10, turns=1, reward=1.0),
    )
    rows = {(row.what, row.cap): row for row in cap_replay.table(load_run(tmp_path))}
    half = rows["turns", 2]
    assert (half.cut, half.solved, half.solved_cut) == (1, 2, 1)
    assert (half.batch_s, half.saved_s) == (42, 20)  # 2 turns of 10 s, then 2 s of grading
    assert (rows["tokens", 131].cut, rows["tokens", 131].saved_s) == (1, 20)


def test_gpu_hours_follow_the_ledger(tmp_path: Path) -> None:
    lines = [
        {"attempt": 1, "started": AT, "finished": AT + 3600},
        {"attempt": 2, "started": AT + 5400, "finished": AT + 9000},
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = events.Step(
        step=1, version=1, wait_s=900, logprob_s=0, update_s=0, publish_s=0, start=AT, end=AT + 900
    )
    fault = events.EngineFault(engine="e", cause="exit", start=AT + 100, end=AT + 100)
    ready = events.EngineState(engine="e", state="ready", start=AT + 460, end=AT + 460)
    late = events.TrajectoryEvent(
        trajectory="0/0/0", draw=0, task="t", attempt=0, cause="submitted", reward=1.0,
        start=AT + 360, end=AT + 400,
    )  # fmt: skip
    write(tmp_path, step, fault, ready, late)
    rows = {row.cause: row.gpu_hours for row in gpu_hours.table(load_run(tmp_path))}
    assert (rows["held"], rows["queue"], rows["idle trainer"]) == (4, 1, 0.25)
    assert rows["recovery"] == pytest.approx(0.1)
    assert rows["start-up"] == pytest.approx(2 * (360 + 3600) / 3600)


def fault(engine: str, at: float) -> events.EngineFault:
    return events.EngineFault(engine=engine, cause="exit", start=AT + at, end=AT + at + 5)


def ready(engine: str, at: float) -> events.EngineState:
    return events.EngineState(engine=engine, state="ready", start=AT + at, end=AT + at)


def test_an_engine_is_down_from_its_fault_to_its_return_and_never_through_the_queue() -> None:
    held = [(AT, AT + 100), (AT + 5000, AT + 6000)]
    twice = gpu_hours.down_s([fault("e", 10), fault("e", 20)], [ready("e", 40)], held)
    assert twice == 30
    never = gpu_hours.down_s([fault("e", 70)], [ready("e", 5040), ready("f", 80)], held)
    assert never == 30


def test_an_attempt_that_nobody_closed_holds_its_nodes_until_the_last_event(tmp_path: Path) -> None:
    line = {"attempt": 1, "started": AT, "finished": AT + 100}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    begun = [
        events.LaunchAttempt(attempt=i, phase="begin", start=AT + at, end=AT + at)
        for i, at in ((1, 0), (2, 200))
    ]
    late = events.TrajectoryEvent(
        trajectory="0/0/0", draw=0, task="t", attempt=0, cause="submitted", reward=1.0,
        start=AT + 250, end=AT + 900,
    )  # fmt: skip
    run = load_run(write(tmp_path, *begun, late))
    assert list(gpu_hours.attempts(run)) == [(AT, AT + 100), (AT + 200, AT + 900)]


def test_engines_of_two_nodes_are_two_though_each_numbers_its_own_from_0(tmp_path: Path) -> None:
    for node, busy in (("gpu-0", 1.0), ("gpu-1", 0.5)):
        writer = events.EventWriter(tmp_path / "events", "inference", node=node)
        for at in range(0, 61, 5):
            state = events.EngineState(
                engine="engine-0", state="load", busy_s=busy * at, running=3,
                generated_tokens=100 * at, start=AT + at, end=AT + at,
            )  # fmt: skip
            writer.write(state)
        writer.close()
    run = load_run(write(tmp_path, trajectory(0, 60)))
    rows = throughput.table(run)
    assert throughput.idle_share(rows) == pytest.approx(0.25)
    assert (throughput.tokens_per_s(rows), rows[0].running) == (pytest.approx(200), 6)
    assert {state.engine for state in run.of(events.EngineState)} == {
        "gpu-0/engine-0", "gpu-1/engine-0",
    }  # fmt: skip


def test_the_rate_within_a_window_is_of_the_windows_time(tmp_path: Path) -> None:
    write(tmp_path, *(trajectory(i, 100 + 10 * i) for i in range(10)))
    rows = throughput.table(load_run(tmp_path, window=Window(since="150s")))
    assert throughput.per_hour(rows) == pytest.approx(3600 * 5 / 40)


def test_sandbox_steps_are_told_by_backend(tmp_path: Path) -> None:
    for i, backend in enumerate(("docker", "docker", "e2b")):
        start = events.SandboxStart(
            trajectory=f"0/{i}/0", backend=backend, queued_s=1, start=AT, end=AT + 3 + i
        )
        tool = events.ToolCall(trajectory=f"0/{i}/0", turn=0, exit_code=0, start=AT + 7, end=AT + 9)
        write(tmp_path, start, tool, trajectory(i, 20))
    rows = {(row.backend, row.phase): row for row in sandbox_time.table(load_run(tmp_path))}
    assert (rows["docker", "start"].n, rows["docker", "start"].longest) == (2, 3)
    assert (rows["e2b", "start"].median, rows["e2b", "command"].median) == (4, 2)


def test_a_trace_opens_in_a_viewer_and_says_what_it_left_out(tmp_path: Path) -> None:
    write(tmp_path, *call(0, 0, 10, 50), trajectory(0, 12), trajectory(1, 15))
    path = tmp_path / "trace.json"
    said = perfetto.write_trace(trace.window(load_run(tmp_path)), path, most=3)
    found = json.loads(path.read_bytes())["traceEvents"]
    spans = [e for e in found if e["ph"] == "X"]
    assert "1 later ones left out" in said
    assert {e["tid"] for e in spans if e["name"].startswith("trajectory")} == {0, 1}
    assert spans[0]["ts"] == AT * 1e6
    assert found[0]["args"] == {"name": "node a"}


def test_a_lane_is_taken_again_when_it_is_free() -> None:
    starts, ends = [0.0, 1.0, 2.0, 0.0, 5.0], [2.0, 4.0, 3.0, 9.0, 6.0]
    assert lanes.lanes(starts, ends, ["a", "a", "a", "b", "a"]) == [0, 1, 0, 0, 0]


def test_a_trace_shows_what_was_under_way_and_whose_it_was(tmp_path: Path) -> None:
    write(tmp_path, *call(0, 0, 10, 50), *call(0, 1, 400, 90), trajectory(0, 402))
    run = load_run(tmp_path)
    found = lanes.spans(run, (AT + 9.5, AT + 300))
    assert [(span.phase, span.node) for span in found] == [
        ("trajectory", "node a"), ("command", "node a"),
    ]  # fmt: skip
    rows = trace.bars(lanes.spans(run, (AT, AT + 402)), (AT, AT + 402))
    assert trace.shares(rows) == {"model call": 18 / 400, "command": 2 / 400}


def test_advice_is_only_given_above_its_bound(tmp_path: Path) -> None:
    some = [trajectory(i, 10, cause="turn_limit") for i in range(4)]
    write(tmp_path, *some, *(trajectory(i, 10) for i in range(4, 10)))
    (first, *_) = what_now.table(load_run(tmp_path))
    assert (first.setting, first.share) == ("agent.max_turns", 0.4)
    write(tmp_path / "fine", trajectory(0, 10), trajectory(1, 10))
    assert what_now.table(load_run(tmp_path / "fine")) == []


def test_a_lower_turn_limit_is_told_in_turns_and_only_where_something_was_solved(
    tmp_path: Path,
) -> None:
    calls = [event for i in range(4) for turn in range(8) for event in call(i, turn, 10 * turn, 99)]
    some = [trajectory(i, 80, cause="turn_limit", turns=8) for i in (1, 2, 3)]
    write(tmp_path / "none", *calls, *some, trajectory(0, 80, turns=8))
    assert "raise it" in what_now.table(load_run(tmp_path / "none"))[0].change
    write(tmp_path / "one", *calls, *some, trajectory(0, 12, turns=1, reward=1.0))
    assert "lower it: a cap of 2 turns" in what_now.table(load_run(tmp_path / "one"))[0].change


def test_idle_engines_without_load_samples_are_unknown_and_not_0(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, trajectory(0, 60), trajectory(1, 90)))
    rows = gpu_hours.table(run)
    assert [row.cause for row in rows if row.gpu_hours != row.gpu_hours] == ["idle engines"]
    assert ("idle engines", "unknown", "", "unknown: no load samples") in page.hours(run).rows


def test_a_trace_begins_and_ends_with_what_was_under_way(tmp_path: Path) -> None:
    write(tmp_path, *call(0, 0, 110, 50), trajectory(0, 110))
    found = lanes.spans(load_run(tmp_path), (AT, AT + 600))
    assert [(row.start, row.end) for row in trace.bars(found, (AT, AT + 600))] == [(0, 9), (9, 10)]


def test_queue_and_cache_use_come_from_engine_metrics(tmp_path: Path) -> None:
    metrics = [
        events.EngineMetrics(
            engine=engine, running=4, queued=2, token_usage=0.5, throughput=100.0,
            start=AT + at, end=AT + at,
        )
        for engine in "ab"
        for at in range(0, 61, 5)
    ]  # fmt: skip
    write(tmp_path, *metrics, trajectory(0, 60))
    rows = throughput.table(load_run(tmp_path))
    assert (rows[0].running, rows[0].queued, rows[0].kv_use) == (8, 4, 0.5)
    assert throughput.tokens_per_s(rows) == pytest.approx(200)


@pytest.mark.parametrize("by", ["repository", "difficulty"])
def test_repositories_and_difficulties_are_told_apart(tmp_path: Path, by: str) -> None:
    out = write_summary(tmp_path, "rl", "held_out", 1.0, [[True], [True], [False]])
    found = json.loads((out / "summary.json").read_text())
    found.pop("difficulty", None)
    found[by] = {"t0": "easy", "t1": "easy", "t2": "hard"}
    (out / "summary.json").write_text(json.dumps(found))
    rows = {row.group: (row.value, row.tasks) for row in solve_groups.table(load_run(tmp_path))}
    assert rows == {"easy": (1.0, 2), "hard": (0.0, 1)}


def test_a_comparison_pairs_evaluations_by_task(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    write_summary(before, "rl", "held_out", 1.0, [[False], [True]])
    write_summary(after, "rl", "held_out", 1.0, [[True], [True], [True]])
    write(before, trajectory(0, 10))
    write(after, trajectory(0, 5), trajectory(1, 5))
    rows = {row.measure: row for row in compare.table(load_run(before), load_run(after))}
    assert rows["trajectories an hour"].ratio == 4
    solved = rows["pass@1 RL, held_out, T=1"]
    assert (solved.first, solved.second, solved.second_n) == (50, 100, 2)


def test_two_runs_are_compared_or_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="takes two run directories"):
        write_report([tmp_path], is_compared=True)


@pytest.mark.parametrize("name", ["sandbox", "a run with a name of many words: command", "x" * 99])
def test_names_beside_a_phones_axis_keep_apart(name: str) -> None:
    (shown,) = plot.broken([name], narrow=True)
    assert plot.row_in([name], narrow=True, least=0.1) > plot.LINE_IN * len(shown.split("\n"))


@pytest.mark.parametrize("text", ["99 % of time was waiting, n = 7", "WWW " * 30, "W" * 200])
def test_a_headline_is_no_wider_than_its_figure(text: str) -> None:
    font = FontProperties(size=10.5, weight="bold")
    lines = plot.wrapped(plot.together(text), 2.0, font).split("\n")
    widths = [text_to_path.get_text_width_height_descent(x, font, ismath=False)[0] for x in lines]
    assert max(widths) / 72 <= 2.0
    assert not any(line.startswith("%") for line in lines)


def test_a_zero_on_the_floor_of_a_panel_is_seen() -> None:
    _, (axes,) = plot.grid(1, narrow=False)
    assert len(plot.keep_in_view(axes, range(51), [0.0, *[1.0] * 50])) == 51


def test_several_runs_have_their_sandboxes_side_by_side(tmp_path: Path) -> None:
    for i, name in enumerate(("one", "two")):
        start = events.SandboxStart(trajectory="0/0/0", backend="docker", start=AT, end=AT + 3 + i)
        failed = events.SandboxStart(
            trajectory="0/0/0", backend="docker", ok=False, start=AT, end=AT + 60
        )
        write(tmp_path / name, start, failed, trajectory(0, 100))
    runs = {name: load_run(tmp_path / name) for name in ("one", "two")}
    rows = sandbox_time.side_by_side(runs)
    assert [(row.backend, row.phase, row.n, row.median) for row in rows] == [
        ("one, docker", "start", 1, 3), ("two, docker", "start", 1, 4),
    ]  # fmt: skip


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert several.labels([tmp_path / "a" / "demo", tmp_path / "b" / "demo"]) == [
        "a/demo", "b/demo",
    ]  # fmt: skip
    with pytest.raises(RecordError, match="named twice"):
        several.labels([tmp_path, tmp_path])


def test_a_load_sample_holds_until_the_next_and_not_through_an_outage(tmp_path: Path) -> None:
    metrics = [
        events.EngineMetrics(engine="a", running=n, start=AT + at, end=AT + at)
        for at, n in ((0, 2), (10, 4), (20, 6), (50, 8), (60, 0))
    ]
    write(tmp_path, *metrics, trajectory(0, 60))
    running = [row.running for row in throughput.table(load_run(tmp_path))]
    assert (running[5], running[15], running[25], running[55]) == (2, 4, 6, 8)
    write(tmp_path / "down", *metrics[:3], metrics[4], trajectory(0, 60))
    running = [row.running for row in throughput.table(load_run(tmp_path / "down"))]
    assert running[49] == 6
    assert running[50] != running[50]


def test_a_value_far_out_is_marked_and_not_cut(tmp_path: Path) -> None:
    _, (axes,) = plot.grid(1, narrow=False)
    values = [0.01] * 50 + [0.77]
    assert len(plot.keep_in_view(axes, range(51), values)) == 50
    assert axes.get_ylim()[1] < 0.1
    assert [text.get_text() for text in axes.texts] == ["0.77"]


@pytest.mark.slow
def test_the_command_prints_numbers_that_scripts_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, trajectory(0, 10), trajectory(1, 20))
    assert command.main([str(tmp_path), "--json", "--until", "1h"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["long_tail"]["trajectories"] == 2
    assert found["throughput"]["engines_idle"] is None
