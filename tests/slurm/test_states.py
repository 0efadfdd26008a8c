"""Slurm's states: every one has its place, and what is not known is never an end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import QueryError
from slurm import states
from slurm.states import ENDED, LIVE, JobState, parse_sacct, parse_squeue, query, worst

Fake = Callable[..., Path]
SLURMS = """\
BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL
OUT_OF_MEMORY PENDING PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING
REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT LAUNCH_FAILED RECONFIG_FAIL
POWER_UP_NODE UPDATE_DB EXPEDITING""".split()  # noqa: SIM905  as the manual lists them
"""Job state codes and flags of squeue(1) and sacct(1), 20.11 to 25.05."""


def job(*words: str) -> JobState:
    lines = [f"6+{i}|{6 + i}|{word}|n{i}|p|1:00|None" for i, word in enumerate(words)]
    return parse_squeue("\n".join(lines))["6"]


@pytest.mark.parametrize("state", SLURMS)
def test_every_state_of_slurms_has_its_place(state: str) -> None:
    assert (state in LIVE) != (state in ENDED)


def test_no_other_state_is_made_up() -> None:
    assert sorted((*LIVE, *ENDED)) == sorted(SLURMS)


@pytest.mark.parametrize(("live", "ended"), list(product(LIVE, ENDED)))
def test_a_job_lives_while_a_component_does(live: str, ended: str) -> None:
    assert not job(live, ended).is_done
    assert worst([ended, live]) == live


def test_of_ended_components_the_worst_is_the_jobs() -> None:
    assert job("COMPLETED", "TIMEOUT").state == "TIMEOUT"
    assert job("CANCELLED", "NODE_FAIL").state == "NODE_FAIL"
    assert job("COMPLETED", "COMPLETED").is_done


@given(st.lists(st.sampled_from([*SLURMS, "WHATEVER_2027"]), min_size=1, max_size=4))
def test_a_state_that_is_new_to_us_is_shown_raw_and_is_no_end(words: list[str]) -> None:
    found = worst(words)
    assert found in words
    assert (found == "WHATEVER_2027") == ("WHATEVER_2027" in words)
    assert "WHATEVER_2027" not in ENDED


def test_no_components_are_unknown_and_no_end() -> None:
    assert worst([]) == "UNKNOWN"
    assert "UNKNOWN" not in ENDED


def test_a_component_that_waits_alone_for_ever_does_not_hold_the_job() -> None:
    found = job("COMPLETED", "PENDING")
    assert (found.is_done, found.state) == (True, "COMPLETED")
    assert [one.job_id for one in found.stranded] == ["7"]


@pytest.mark.parametrize("first", states.REQUEUED_BY_SLURM)
def test_a_job_on_its_way_back_into_the_queue_is_not_over(first: str) -> None:
    assert not job(first, "PENDING").is_done


def test_squeue_gives_components_with_where_and_why() -> None:
    text = "6+1|7|PENDING||inference|1:00:00|Nodes required | busy\n6+0|6|RUNNING|trn0|t|59:01|None"
    first, second = parse_squeue(text)["6"].components
    assert (first.index, first.nodes, first.reason, first.time_left) == (0, "trn0", "", "59:01")
    assert (second.job_id, second.state, second.reason) == ("7", "PENDING", "Nodes required | busy")


@pytest.mark.parametrize("line", ["", "JOBID|STATE", "7_3|9|RUNNING|a|p|1|None", "welcome to LUMI"])
def test_lines_of_others_are_passed_over(line: str) -> None:
    assert parse_squeue(line) == {}


def test_sacct_tells_who_cancelled_and_lists_no_steps() -> None:
    text = "11+0|11|CANCELLED by 1000|trn0|t\n11+0.0|11.0|FAILED|trn0|\n11+1|12|COMPLETED|inf0|i"
    found = parse_sacct(text)["11"]
    assert [one.state for one in found.components] == ["CANCELLED", "COMPLETED"]
    assert found.state == "CANCELLED"


# Asking


def test_one_squeue_answers_for_all_jobs(fake_program: Fake) -> None:
    calls = fake_program(
        "squeue", "echo '6+0|6|RUNNING|a|p|1|None'; echo '8|8|PENDING||p|1|Priority'"
    )
    assert {job: found.state for job, found in query(["6", "8"]).items()} == {
        "6": "RUNNING",
        "8": "PENDING",
    }
    assert calls.read_text().splitlines().count("squeue") == 1
    assert "--jobs=6,8" in calls.read_text()


def test_no_job_asks_nothing(fake_program: Fake) -> None:
    calls = fake_program("squeue", "exit 1")
    assert query([]) == {}
    assert not calls.exists()


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_what_squeue_forgot_is_asked_of_sacct(fake_program: Fake) -> None:
    fake_program("squeue", FORGOTTEN)
    fake_program("sacct", "echo '6+0|6|COMPLETED|a|p'; echo '6+1|7|OUT_OF_MEMORY|b|p'")
    assert query(["6"])["6"].state == "OUT_OF_MEMORY"


def test_without_accounting_a_forgotten_job_is_left_out(fake_program: Fake) -> None:
    fake_program("squeue", FORGOTTEN)
    fake_program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert query(["6"]) == {}


def test_a_controller_that_is_down_says_nothing_of_a_job(fake_program: Fake) -> None:
    fake_program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(QueryError, match="squeue exited 1: Unable to contact"):
        query(["6"])


def test_a_machine_without_sacct_has_no_accounting(
    fake_program: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_program("squeue", FORGOTTEN)
    monkeypatch.setenv("PATH", f"{calls.parent}")
    assert query(["6"]) == {}


def test_a_database_that_is_down_says_nothing_of_a_job(fake_program: Fake) -> None:
    fake_program("squeue", FORGOTTEN)
    fake_program("sacct", "echo 'Problem talking to the database' >&2; exit 1")
    with pytest.raises(QueryError, match="Problem talking to the database"):
        query(["6"])
