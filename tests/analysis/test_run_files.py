"""A run directory is read as far as it goes; what is missing or torn is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_run import BEGIN, Made, make_run, tear, write_summary

from agentrl import events
from agentrl.errors import RecordError
from analysis.evaluations import read_evaluation
from analysis.run_files import load_run
from analysis.stages import spoken, stages
from analysis.steps import lineage, steady

SMALL = Made(steps=6, resume_at=0)
RESUMED = Made(steps=6, resume_at=3)


def step(number: int, at: float) -> events.Step:
    return events.Step(
        step=number, version=number, wait_s=1, logprob_s=0, update_s=1, publish_s=0,
        start=at - 2, end=at,
    )  # fmt: skip


def test_a_whole_run_has_no_problem(odd_path: Path) -> None:
    run = load_run(make_run(odd_path / "demo", SMALL))
    assert run.problems == ()
    assert (run.name, len(run.of(events.Step)), len(run.evaluations)) == ("demo", 6, 8)
    assert run.sft is not None
    assert run.sft.steps == 750


def test_an_empty_folder_says_all_that_is_missing(tmp_path: Path) -> None:
    said = " ".join(load_run(tmp_path).problems)
    for name in ("config.yaml", "events/", "evaluations/", "provenance.json"):
        assert name in said


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nowhere: no such folder .* give a run directory"):
        load_run(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; run as another user")
def test_a_run_beside_which_no_report_can_stand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o500)
    with pytest.raises(RecordError, match="link the run's files"):
        load_run(tmp_path / "theirs")


def test_files_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    for name in ("ledger.jsonl", "provenance.json", "sft/a.sft.json", "evaluations/b/summary.json"):
        (tmp_path / name).mkdir(parents=True)
    said = "\n".join(load_run(tmp_path).problems)
    for name in ("ledger.jsonl", "provenance.json", "a.sft.json", "b/summary.json"):
        assert name in said


def test_torn_and_unknown_event_lines_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "demo", SMALL)
    (torn,) = (tmp_path / "demo" / "events").glob("trainer-*")
    tear(torn)
    with (tmp_path / "demo" / "events" / "other-a-1.jsonl").open("w") as file:
        file.write('{"kind":"of tomorrow"}\n\0\0\0\n')
    run = load_run(tmp_path / "demo")
    assert run.rejected == {
        "torn last line": 1, "unknown kind of tomorrow": 1, "NUL bytes alone": 1,
    }  # fmt: skip
    assert sum("lines left out" in problem for problem in run.problems) == 3
    assert len(run.of(events.Step)) == 5


def test_events_of_fine_tuning_and_evaluation_stay_out_of_the_training(tmp_path: Path) -> None:
    for role in ("trainer", "sft", "evaluate"):
        writer = events.EventWriter(tmp_path / "events", role, node="a")
        writer.write(step(1, BEGIN))
        writer.close()
    run = load_run(tmp_path)
    assert (len(run.store), run.aside) == (1, 2)


def test_a_summary_that_is_cut_is_a_problem_and_the_others_are_read(tmp_path: Path) -> None:
    write_summary(tmp_path, "sft", "held_out", 1.0, [[True, False]])
    tear(write_summary(tmp_path, "rl", "held_out", 1.0, [[True, True]]) / "summary.json")
    run = load_run(tmp_path)
    assert [each.model for each in run.evaluations] == ["sft"]
    assert any("rl-held_out-T1.0/summary.json" in problem for problem in run.problems)


def test_the_model_is_the_part_of_the_name_before_the_first_dash(tmp_path: Path) -> None:
    out = write_summary(tmp_path, "rl", "unseen_sites", 0.5, [[True, False, False, False]])
    found = read_evaluation(out / "summary.json")
    assert (found.model, found.split, found.temperature) == ("rl", "unseen_sites", 0.5)
    assert found.pass_at[1].value == 0.25
    assert found.per_task == {"t0": 0.25}


def test_a_step_done_again_after_a_resume_takes_the_place_of_the_first() -> None:
    loaded = events.CheckpointEvent(step=2, phase="loaded", end=10)
    again = step(3, 13)
    line = lineage([step(1, 1), step(2, 3), step(3, 5), step(4, 7), loaded, again])
    assert line.steps == (step(1, 1), step(2, 3), again)
    assert (line.resumes, line.superseded) == ((2,), 2)


def test_a_resume_is_seen_without_its_checkpoint_event() -> None:
    line = lineage([step(1, 1), step(2, 3), step(2, 9)])
    assert ([each.end for each in line.steps], line.resumes, line.superseded) == ([1, 9], (1,), 1)


def test_the_steady_state_leaves_out_warm_up_and_the_step_after_a_resume() -> None:
    steps = [step(number, number) for number in range(1, 21)]
    counted = [s.step for s, yes in zip(steps, steady(steps, (10,)), strict=True) if yes]
    assert counted == [*range(3, 11), *range(12, 21)]
    assert steady(steps[:4], ()) == [True] * 4


def test_stages_name_the_file_that_their_time_is_from(tmp_path: Path) -> None:
    found = stages(load_run(make_run(tmp_path / "demo", RESUMED)))
    assert [each.kind for each in found[:3]] == ["sft", "rl", "rl"]
    assert found[0].seconds == 112.5
    assert all(each.source for each in found)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.25, "3.2 s"), (59.6, "1 min 0 s"), (312, "5 min 12 s"), (12000, "3 h 20 min")],
)
def test_times_are_told_for_people(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_reading_runs_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, analysis.run_files, analysis.stages, analysis.steps;"
        "print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_report_needs_no_torch() -> None:
    code = "import sys, analysis.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
