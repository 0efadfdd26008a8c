"""Roles that take no time: the launching, the signals and the requeues around them are real.

Their run directory says how they fail: a file FAULTS/ROLE-NODE holds an exit code, or `kill`; the
role meets it at step AT (the file's second word) and, unless a third word says `always`, once. In
the first launch attempt the trainer waits at the step that a file HOLD names until that is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.events import EventWriter, Step, now
from agentrl.handoff.publish import publish_bytes
from launch.roles import play
from launch.run_dir import RunDir
from launch.signals import StopFlag

STEP_S = 0.5
LIMIT_S = 600.0


def trainer_role(run_dir: str, attempt: int) -> int:
    """Take steps of half a second; checkpoint every `training.checkpoint_every`, and when asked."""

    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        run = RunDir(Path(run_dir))
        (run.path / f"done-{attempt}").unlink(missing_ok=True)
        for step in range(run.checkpoint_step() + 1, config.training.steps + 1):
            fail(run.path, "trainer-0", step)
            while not pause(stop, STEP_S) and attempt == 1 and is_held(run.path, step):
                continue
            if stop():
                save(run, step - 1)
                return 75
            events.write(a_step(step))
            if step % config.training.checkpoint_every == 0:
                save(run, step)
        save(run, config.training.steps)
        (run.path / f"done-{attempt}").touch()
        return 0

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def inference_role(run_dir: str, attempt: int, node: int) -> int:
    """Do nothing until the trainer is done or the end is asked for."""

    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            fail(Path(run_dir), f"inference-{node}", RunDir(Path(run_dir)).checkpoint_step())
            if pause(stop, STEP_S / 2):
                return 75
            if (Path(run_dir) / f"done-{attempt}").exists():
                return 0
        raise TimeoutError("the trainer never ended")

    return play("inference", body, run_dir=run_dir, attempt=attempt, node=node)


def pause(stop: StopFlag, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop():
        time.sleep(0.02)
    return stop()


def is_held(run: Path, step: int) -> bool:
    path = run / "HOLD"
    return path.is_file() and step >= int(path.read_text())


def save(run: RunDir, step: int) -> None:
    """Publish a checkpoint that `agentrl audit` reads: step N has trained draw N - 1."""
    target = run.path / "checkpoints" / f"step-{step:06d}"
    if not step or target.exists():
        return
    draft = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    consumed = json.dumps({"trained": [[0, step - 1]]}).encode()
    entry = {"size": len(consumed), "sha256": hashlib.sha256(consumed).hexdigest()}
    publish_bytes(draft / "consumed.json", consumed)
    publish_bytes(draft / "manifest.json", json.dumps({"files": {"consumed.json": entry}}).encode())
    draft.rename(target)


def fail(run: Path, task: str, step: int) -> None:
    path = run / "FAULTS" / task
    if not path.is_file():
        return
    how, at, *rest = path.read_text().split()
    if step < int(at):
        return
    if "always" not in rest:
        path.unlink()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(how))


def a_step(step: int) -> Step:
    return Step(
        step=step,
        version=step,
        wait_s=STEP_S,
        logprob_s=0,
        update_s=0,
        publish_s=0,
        start=now() - STEP_S,
        end=now(),
    )
