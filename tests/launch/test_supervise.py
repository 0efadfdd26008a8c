"""A run's launch attempts, with real processes as roles."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_gone

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from launch import resume, status, stop
from launch.run_dir import RunDir, begin_attempt, create, launcher_of
from slurm import exit_record, ledger

pytestmark = pytest.mark.slow  # whole runs of light roles

HERE = Path(__file__).parent


def until(claim: Callable[[], object], what: str, deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    return create(RunConfig(name="r", runs_dir=str(odd_path), grace_s=30), ["test"])


@pytest.fixture
def start(run: RunDir) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(trainer: str, inference: str = "serves") -> subprocess.Popen[str]:
        code = "import sys, small_roles; sys.exit(small_roles.launch(*sys.argv[1:]))"
        launcher = subprocess.Popen(
            [sys.executable, "-c", code, str(run.path), trainer, inference],
            env=os.environ | {"PYTHONPATH": str(HERE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(launcher)
        return launcher

    yield begin
    for launcher in started:
        launcher.kill()
        launcher.wait()
        if launcher.stdout is not None:
            launcher.stdout.close()


Start = Callable[..., "subprocess.Popen[str]"]


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = launcher.communicate(timeout=180)
    return launcher.returncode, said


def test_a_finished_run_leaves_records_of_both_roles_and_a_ledger_line(
    run: RunDir, start: Start
) -> None:
    code, said = finish(start("finishes"))
    assert code == 0, said
    assert "r 5/100 reward 0.500" in said
    [line] = ledger.read(run.path)
    assert (line.action, line.began, line.step_begin, line.step_end) == ("done", "started", 0, 5)
    records = {role: exit_record.read(run.attempt(1), role, 0) for role in ("trainer", "inference")}
    assert [(r.code, r.cause) for r in records.values() if r] == [(0, "done")] * 2
    assert (run.attempt(1) / "logs" / "trainer-0.err").read_text()
    assert resume.main([str(run.path)]) == 0


def test_a_killed_trainer_is_started_again_in_the_same_attempt(run: RunDir, start: Start) -> None:
    code, said = finish(start("is_killed_once"))
    assert code == 0, said
    assert "killed by SIGKILL" in said
    assert "engines stay" in said
    [line] = ledger.read(run.path)
    assert (line.restarts, line.step_end) == (1, 2)
    assert (run.attempt(1) / "exit" / "trainer-0.1.json").is_file()
    inference = exit_record.read(run.attempt(1), "inference", 0)
    assert inference is not None
    assert inference.cause == "done"


def test_a_trainer_that_is_always_killed_ends_the_run_after_k_attempts(
    run: RunDir, start: Start
) -> None:
    code, said = finish(start("is_always_killed"))
    assert code == 1, said
    assert "3 launch attempts in a row made no new checkpoint" in said
    assert [line.action for line in ledger.read(run.path)] == ["requeue", "requeue", "stop"]


@pytest.mark.parametrize(
    ("trainer", "inference", "code", "told"),
    [
        pytest.param("crashes", "serves", 1, "a bug", marks=pytest.mark.slow),
        pytest.param("is_misconfigured", "serves", 2, "model.path=x", marks=pytest.mark.slow),
        ("saves_when_asked", "has_too_many_failures", 1, "36 of 40"),
    ],
)
def test_what_no_restart_mends_ends_the_run_at_once(
    run: RunDir, start: Start, trainer: str, inference: str, code: int, told: str
) -> None:
    found, said = finish(start(trainer, inference))
    assert (found, told in said) == (code, True), said
    assert len(ledger.read(run.path)) == 1


def test_ctrl_c_saves_and_names_the_command_that_goes_on(run: RunDir, start: Start) -> None:
    launcher = start("saves_when_asked")
    until((run.path / "trainer-is-up-1").is_file, "the trainer is up")
    launcher.send_signal(signal.SIGINT)
    code, said = finish(launcher)
    assert code == 75, said
    assert f"$ agentrl resume {run.path}" in said
    assert ledger.read(run.path)[0].step_end == 3
    assert status.facts(run)["state"] == "saved"


def test_a_second_ctrl_c_kills_what_does_not_listen(run: RunDir, start: Start) -> None:
    launcher = start("hangs")
    up = run.path / "trainer-is-up-1"
    until(lambda: up.is_file() and up.read_text(), "the trainer is up")
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout is not None
    until(lambda: re.search("asked to stop", launcher.stdout.readline()), "it heard")  # type: ignore[union-attr]
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 75
    assert is_gone(int(up.read_text()))


def test_a_time_limit_signal_saves_and_begins_another_attempt(run: RunDir, start: Start) -> None:
    launcher = start("saves_when_asked")
    until((run.path / "trainer-is-up-1").is_file, "the trainer is up")
    launcher.send_signal(signal.SIGUSR2)
    until((run.path / "trainer-is-up-2").is_file, "the next attempt's trainer is up")
    launcher.send_signal(signal.SIGTERM)
    assert finish(launcher)[0] == 75
    assert [line.action for line in ledger.read(run.path)] == ["requeue", "stop"]


def test_stop_asks_and_waits_for_the_end(run: RunDir, start: Start) -> None:
    launcher = start("saves_when_asked")
    until((run.path / "trainer-is-up-1").is_file, "the trainer is up")
    with pytest.raises(LaunchError, match="still runs"):
        begin_attempt(run, [])
    assert status.facts(run)["state"] == "running"
    assert stop.main([str(run.path)]) == 0
    assert finish(launcher)[0] == 75


def test_a_killed_launcher_leaves_nothing_and_its_attempt_is_told(
    run: RunDir, start: Start
) -> None:
    launcher = start("saves_when_asked")
    up = run.path / "trainer-is-up-1"
    until(lambda: up.is_file() and up.read_text(), "the trainer is up")
    launcher.kill()
    launcher.wait()
    until(lambda: is_gone(int(up.read_text())), "the trainer's end")
    assert status.facts(run)["state"].startswith("lost")
    assert begin_attempt(run, ["again"]) == 2
    [line] = ledger.read(run.path)
    assert (line.action, line.step_end) == ("lost", 3)
    assert launcher_of(run, 2)["argv"] == ["again"]


def test_a_moved_run_is_where_it_now_is(run: RunDir, tmp_path: Path) -> None:
    moved = RunDir.open(run.path.rename(tmp_path / "else where"))
    assert moved.config().run_dir == moved.path
    assert schema.load(moved.path / "config.yaml").name == "r"
