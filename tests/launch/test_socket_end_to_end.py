"""A tiny run by socket: its trainer is killed half-way, its command stopped, then it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_end_to_end import (
    STEPS,
    Begin,
    agentrl,
    leftovers,
    run_of,
    steps_taken,
    trainer_pid,
    trains,
    until,
)
from test_end_to_end import begin as begin
from test_end_to_end import config as config

from agentrl import events
from launch.run_dir import RunDir
from slurm import ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def refusals(run: RunDir) -> list[str]:
    found = events.read_folder(run.path / "events")
    return [one.reason for one in found if isinstance(one, events.Drop)]


def test_a_run_by_socket_outlives_its_trainer_and_a_stop_and_every_draw_is_accounted_for(
    config: Path, begin: Begin
) -> None:
    run = run_of(config, "by socket")
    by_socket = [*trains(config, "by socket"), "handoff=socket", "rollout.workers=2"]
    launcher = begin(*by_socket)
    until(lambda: steps_taken(run) >= 2, "two steps")
    os.kill(trainer_pid(run), signal.SIGKILL)  # the workers stay, and reconnect
    until(lambda: steps_taken(run) >= 4, "two more steps")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 75, said
    assert agentrl("audit", run.path) == 0
    assert leftovers(run.path) == []

    launcher = begin("resume", run.path)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert run.checkpoint_step() == STEPS
    assert [line.action for line in ledger.read(run.path)] == ["stop", "done"]
    assert ledger.read(run.path)[0].restarts == 1
    assert agentrl("audit", run.path) == 0
    assert leftovers(run.path) == []
    assert {"wrong_run", "torn", "too_large", "malformed"}.isdisjoint(refusals(run))
