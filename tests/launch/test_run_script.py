"""The batch script of a run, as bash runs it: srun, scontrol, scancel and squeue are ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig
from launch import cluster_run
from launch.run_dir import RunDir, create
from slurm import ledger
from slurm.lab_process import wait_for

pytestmark = pytest.mark.slow  # the script with programs that stand for Slurm

LIMIT_S = 120.0
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "trn0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "inf0",
}


class Script(NamedTuple):
    run: RunDir
    process: subprocess.Popen[bytes]
    steered: Path
    """What scontrol was asked."""


SRUN = """\
cd "$RUN"
record=attempts/0001/exit/trainer-0.json
case "$*" in
*slurm.proof*) exit 0 ;;
*"launch.role trainer"*) {trainer} ;;
*) until [ -e told ] || [ -e over ]; do sleep 0.05; done ;;
esac
"""
SCONTROL = '[ "$1" = show ] && echo "$3"; [ "$1" = requeue ] && kill -TERM $PPID; exit 0'
IS_AWAY_AT_FIRST = """\
[ "$1" = requeue ] && [ ! -e "$RUN/was-asked" ] && touch "$RUN/was-asked" && exit 1
"""
SAVES = """\
touch up
until [ -e told ]; do sleep 0.05; done
mkdir -p checkpoints/step-000002
echo '{"role": "trainer", "node": 0, "code": 75, "cause": "saved"}' >"$record"
exit 75
"""
IS_DONE = """\
echo '{"role": "trainer", "node": 0, "code": 0, "cause": "done"}' >"$record"
touch over
exit 0
"""


@pytest.fixture
def start(odd_path: Path, fake_program: Callable[..., Path]) -> Callable[..., Script]:
    """Start the script of a run whose trainer is a piece of shell, run in the run's folder."""
    config = RunConfig(name="r", runs_dir=str(odd_path), cluster=ClusterConfig(name="lab"))
    run = create(config, ["test"])

    def begin(trainer: str, controller: str = "") -> Script:
        fake_program("srun", SRUN.format(trainer=trainer))
        steered = fake_program("scontrol", controller + SCONTROL)
        fake_program("scancel", 'touch "$RUN/told"')
        fake_program("squeue", "echo '7|7|RUNNING|trn0|all|1:00|None'")
        text = run.path / "script.sbatch"
        text.write_text(cluster_run.script_of(run.config(), run, 1, began="started"))
        env = {**os.environ, **JOB, "RUN": str(run.path)}
        return Script(run, subprocess.Popen(["bash", text], env=env), steered)

    return begin


def test_a_run_that_is_done_ends_its_job_and_requeues_nothing(
    start: Callable[..., Script],
) -> None:
    script = start(IS_DONE)
    assert script.process.wait(LIMIT_S) == 0
    assert [line.action for line in ledger.read(script.run.path)] == ["done"]
    assert "requeue" not in script.steered.read_text()


def test_ahead_of_the_limit_the_roles_are_told_and_the_job_is_requeued_once(
    start: Callable[..., Script],
) -> None:
    script = start(SAVES)
    wait_for((script.run.path / "up").exists, LIMIT_S, "the trainer")
    script.process.send_signal(signal.SIGUSR2)
    assert script.process.wait(LIMIT_S) == -signal.SIGTERM  # as Slurm ends this life
    assert [line.action for line in ledger.read(script.run.path)] == ["requeue"]
    assert script.steered.read_text().count("requeue\n7\n") == 1


def test_a_controller_that_is_away_when_a_job_asks_for_its_requeue_is_asked_again(
    start: Callable[..., Script],
) -> None:
    script = start(SAVES, IS_AWAY_AT_FIRST)
    wait_for((script.run.path / "up").exists, LIMIT_S, "the trainer")
    script.process.send_signal(signal.SIGUSR2)
    assert script.process.wait(LIMIT_S) == -signal.SIGTERM
    assert script.steered.read_text().count("requeue\n7\n") == 2


def test_a_verdict_that_cannot_be_had_fails_the_job_and_requeues_nothing(
    start: Callable[..., Script],
) -> None:
    script = start("rm config.yaml; exit 3")
    assert script.process.wait(LIMIT_S) == 1
    assert "requeue" not in script.steered.read_text()
