"""A made run of the published example's shape comes out of the pipeline with its numbers."""

from __future__ import annotations

import pytest

from analysis import (
    cap_replay,
    compare,
    faults,
    gpu_hours,
    long_tail,
    solve_groups,
    solve_rate,
    step_time,
    throughput,
    training_curves,
    trajectory_time,
    what_now,
)
from analysis.run_files import Run, load_run
from benchmarks.make_inference import CYCLE_S, ENGINES, NODES, Shape
from benchmarks.make_run import Truth, make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Truth]:
    folder = tmp_path_factory.mktemp("runs") / "made"
    shape = Shape(trajectories=1600, calls=114_177, damage=True)
    truth = make(folder, shape)
    return load_run(folder), truth


def test_damage_is_counted_and_undone(made: tuple[Run, Truth]) -> None:
    run, truth = made
    index = run.store.index
    assert run.rejected == {"torn last line": truth.torn, "NUL bytes alone": truth.nul}
    assert index.mends.repeats == {"grade": truth.repeats}
    (skew,) = index.mends.skews
    assert skew.seconds == pytest.approx(truth.skew_s, abs=1.0)


def test_a_step_is_131_and_60_and_16_of_208_seconds_with_23_apart(made: tuple[Run, Truth]) -> None:
    rows = step_time.table(made[0])
    mean = step_time.means(rows)
    parts = [round(mean[part]) for part in ("update", "wait", "logprob", "publish")]
    assert parts == [131, 60, 16, 23]
    assert round(step_time.step_seconds(rows)) == 208


def test_steps_that_resumes_undid_are_counted(made: tuple[Run, Truth]) -> None:
    run, truth = made
    rows = {(row.kind, row.cause): row.count for row in faults.by_cause(faults.table(run))}
    assert rows["undone step", "done again after a resume"] == truth.undone == 6
    assert rows["lost trajectory", "sandbox_start"] == truth.lost > 0
    assert rows["engine fault", "no token progress"] == truth.faults == 3
    assert rows["drop", "group: stale"] == truth.stale == 3
    assert sum(row.resumed for row in training_curves.table(run)) == 3


def test_a_third_of_rollout_time_is_tail(made: tuple[Run, Truth]) -> None:
    run, truth = made
    rows = long_tail.table(run)
    assert long_tail.tail_share(rows) == pytest.approx(truth.tail, abs=0.005)
    assert long_tail.limit_shares(rows) == {"turn_limit": pytest.approx(truth.at_cap)}
    assert long_tail.solved_turns(rows) == 8
    assert max(row.end - row.start for row in rows) == pytest.approx(28.8 * 60)


def test_model_calls_are_77_percent_of_a_trajectory(made: tuple[Run, Truth]) -> None:
    run, truth = made
    shares = trajectory_time.shares(trajectory_time.table(run))
    assert shares["model"] == pytest.approx(truth.model, abs=0.003)
    assert shares["other"] == pytest.approx(0.01, abs=0.002)


def test_solve_rates_are_those_of_100_tasks_by_4(made: tuple[Run, Truth]) -> None:
    rows = solve_rate.table(made[0])
    first = [row for row in rows if row.kind == "pass" and row.k == 1]
    assert [f"{100 * row.value:.1f}" for row in first] == ["7.3", "12.8", "27.5"]
    assert "start 7.3 %, SFT 12.8 %, RL 27.5 %" in solve_rate.headline(rows)
    assert {row.by for row in solve_groups.table(made[0])} == {"repository", "difficulty"}


def test_a_replayed_cap_loses_no_solved_one_above_their_turns(made: tuple[Run, Truth]) -> None:
    rows = {row.cap: row for row in cap_replay.table(made[0]) if row.what == "turns"}
    longer = sum(row.turns > 20 for row in long_tail.table(made[0]))
    assert (rows[20].solved_cut, rows[20].cut) == (0, longer)
    assert 0 < rows[60].saved < rows[20].saved < 1


def test_engines_are_busy_and_full_as_they_were_made(made: tuple[Run, Truth]) -> None:
    rows = throughput.table(made[0])
    assert throughput.idle_share(rows) == pytest.approx(0.2, abs=0.01)
    assert sum(row.kv_use for row in rows) / len(rows) == pytest.approx(0.45, abs=0.02)
    assert sum(row.calls for row in rows) == made[1].calls


def test_advice_names_the_turn_limit_first(made: tuple[Run, Truth]) -> None:
    first = what_now.table(made[0])[0]
    assert (first.setting, round(first.share, 2)) == ("agent.max_turns", 0.84)


def test_gpu_hours_lost_are_told_by_cause(made: tuple[Run, Truth]) -> None:
    rows = {row.cause: row for row in gpu_hours.table(made[0])}
    seconds = sum(row.seconds for row in throughput.table(made[0]))
    idle_hours = 0.2 * seconds / 3600 * ENGINES * len(NODES)
    assert rows["idle engines"].gpu_hours == pytest.approx(idle_hours, rel=0.05)
    down, undone = made[1].down_s, 6 * CYCLE_S
    assert rows["recovery"].how == f"engines down {down:,.0f} s, steps undone {undone:,.0f} s"


def test_a_run_compared_with_itself_has_no_difference(made: tuple[Run, Truth]) -> None:
    rows = compare.table(made[0], made[0])
    assert {round(row.ratio, 6) for row in rows if row.first} == {1.0}
    assert {(row.low, row.high) for row in rows if row.low == row.low} == {(0.0, 0.0)}
