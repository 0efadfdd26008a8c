"""What a batch script asks Python, without a Slurm: its questions are answered from files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from launch import host, status
from launch.attempt import Attempt
from launch.host import Job, after_term, begin, decided
from launch.run_dir import RunDir, create, launcher_of
from slurm import exit_record, ledger
from slurm.exit_record import ExitRecord
from slurm.verdict import Verdict

Fake = Callable[..., Path]
pytestmark = pytest.mark.slow  # roles in processes of their own

JOB = {"SLURM_JOB_ID": "7"}
HOSTS = {"trainer": ["trn0"], "inference": ["inf0", "inf1", "inf2"]}


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    return create(RunConfig(name="r", runs_dir=str(odd_path)), ["test"])


def job(restart: int = 0) -> Job:
    return Job.of(JOB | ({"SLURM_RESTART_COUNT": str(restart)} if restart else {}), HOSTS)


def checkpoint(run: RunDir, step: int) -> None:
    (run.path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def end(role: str, code: int, cause: str, *, step: int = 0) -> ExitRecord:
    return ExitRecord(
        role=role, node=0, code=code, cause=cause, step=step, message=f"{role} {cause}"
    )


def test_each_life_of_a_job_is_an_attempt_and_an_earlier_one_is_settled(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(run, 1, "started", job())
    checkpoint(run, 4)
    begin(run, 1, "started", job(restart=1))
    assert capsys.readouterr().out == "0001\n0002\n"
    [line] = ledger.read(run.path)
    assert (line.action, line.began, line.job, line.step_end) == ("lost", "started", "7", 4)
    assert line.is_by_person
    second = launcher_of(run, 2)
    assert (second["restart"], second["is_by_person"], second["began"]) == (1, False, line.ended)
    assert second["hosts"] == HOSTS


def test_no_attempt_begins_once_the_run_is_done_stopped_or_without_hope(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for restart in range(5):  # max_attempts_without_progress is 3
        begin(run, 1, "started", job(restart))
    assert capsys.readouterr().out.split() == ["0001", "0002", "0003", "over", "over"]
    assert run.attempts() == [1, 2, 3]
    begin(run, 2, "resumed", job())  # a person has looked at it
    assert capsys.readouterr().out == "0004\n"
    run.stop_file.touch()
    begin(run, 2, "resumed", job(1))
    assert capsys.readouterr().out == "over\n"


def test_the_rest_of_a_chain_has_nothing_to_do(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(run, 1, "started", job())
    assert decided(Attempt.of(run, 1), end("trainer", 2, "usage"), asked="") == "stop 2"
    begin(run, 1, "started", job())
    assert capsys.readouterr().out.split() == ["0001", "over"]


def test_a_killed_trainer_is_started_again_and_its_record_kept(run: RunDir) -> None:
    begin(run, 1, "started", job())
    killed = end("trainer", 137, "killed")
    exit_record.write(run.attempt(1), killed)
    assert decided(Attempt.of(run, 1), killed, asked="") == "restart trainer 0"
    assert (run.attempt(1) / "exit" / "trainer-0.1.json").is_file()
    assert decided(Attempt.of(run, 1), end("trainer", 0, "done"), asked="") == "done"
    assert ledger.read(run.path)[0].restarts == 1


def test_a_save_ahead_of_the_limit_is_requeued_and_one_for_a_person_is_not(run: RunDir) -> None:
    begin(run, 1, "started", job())
    checkpoint(run, 2)
    saved = end("trainer", 75, "saved", step=2)
    assert decided(Attempt.of(run, 1), end("inference", 75, "saved"), asked="limit") == "wait"
    assert decided(Attempt.of(run, 1), saved, asked="limit") == "requeue"
    begin(run, 2, "resumed", job())
    run.stop_file.touch()
    assert decided(Attempt.of(run, 2), saved, asked="limit") == "stop 75"
    assert status.ended(run.attempts(), ledger.read(run.path)) == "saved"


@pytest.mark.parametrize(
    ("action", "states", "then"),
    [
        ("requeue", ["COMPLETING"], "gone"),
        ("requeue", ["CANCELLED"], "gone"),
        ("requeue", ["RUNNING"], "requeue"),  # ahead of a preemption with grace
        ("stop", ["COMPLETING"], "stop"),
    ],
)
def test_a_job_that_slurm_is_ending_is_not_requeued_by_us(
    action: str, states: list[str], then: str
) -> None:
    verdict = Verdict(action="requeue" if action == "requeue" else "stop", reason="saved")
    assert after_term(verdict, states).action == then


def test_a_job_of_which_slurm_says_nothing_is_left_to_slurm_and_has_its_line(
    run: RunDir, fake_program: Fake
) -> None:
    fake_program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    begin(run, 1, "started", job())
    checkpoint(run, 2)
    saved = end("trainer", 75, "saved", step=2)
    assert decided(Attempt.of(run, 1), saved, asked="term") == "gone"
    assert [line.action for line in ledger.read(run.path)] == ["gone"]


@pytest.mark.parametrize(
    ("role", "code", "waits"),
    [
        ("trainer", 75, True),
        ("trainer", 143, True),  # srun's word of a role that saved on TERM
        ("inference", 1, True),
        ("trainer", 137, False),
        ("network", 1, False),
    ],
)
def test_a_record_that_can_come_late_is_waited_for(role: str, code: int, waits: bool) -> None:
    assert (host.record_wait_s(role, code) > 0) == waits


def test_a_job_that_slurm_had_given_up_decides_nothing_once_the_run_has_gone_on(
    run: RunDir,
) -> None:
    begin(run, 1, "started", job())
    begin(run, 1, "started", job(restart=1))
    lines = ledger.read(run.path)
    assert decided(Attempt.of(run, 1), end("trainer", 137, "killed"), asked="") == "gone"
    assert ledger.read(run.path) == lines


def test_a_refused_network_is_told_with_its_evidence(run: RunDir) -> None:
    begin(run, 1, "started", job())
    (run.attempt(1) / "logs" / "network.err").write_text("trn0: network refused: no eth7\n")
    host.main(["verdict", str(run.path), "1", "network", "0", "1"])
    [line] = ledger.read(run.path)
    assert (line.action, "no eth7" in line.ended) == ("requeue", True)


def test_the_script_says_who_asked_for_the_end(run: RunDir) -> None:
    begin(run, 1, "started", job())
    exit_record.write(run.attempt(1), end("trainer", 75, "saved"))
    asked = ["verdict", "--asked", "person", str(run.path), "1", "trainer", "0", "75"]
    assert host.main(asked) == 0
    assert ledger.read(run.path)[0].code == 75


def test_the_first_question_of_a_batch_script_waits_for_no_heavy_import() -> None:
    code = "import sys, launch.host; print({'omegaconf', 'jinja2', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_only_a_batch_script_begins_an_attempt() -> None:
    with pytest.raises(LaunchError, match="only a batch script"):
        Job.of({}, HOSTS)
