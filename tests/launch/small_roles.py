"""Roles without a model: they end in every way a real one can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, TooManyInfraFailures
from agentrl.events import EventWriter, Step, now
from launch.roles import play
from launch.signals import StopFlag


def checkpoint(config: RunConfig, step: int) -> None:
    (config.run_dir / "checkpoints" / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)


def wait_for(claim: Callable[[], object], limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while not claim():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody asked to stop")
        time.sleep(0.02)


def until_inference_listens(config: RunConfig, attempt: int) -> None:
    """A trainer that ended sooner would have it killed while it starts."""
    wait_for((config.run_dir / f"inference-listens-{attempt}").is_file)


def finishes(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        until_inference_listens(config, attempt)
        checkpoint(config, 5)
        events.write(
            Step(
                step=5,
                version=5,
                wait_s=1,
                logprob_s=0,
                update_s=1,
                publish_s=0,
                metrics={"reward": 0.5},
                start=now() - 2,
                end=now(),
            )
        )
        return 0

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def saves_when_asked(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        (config.run_dir / f"trainer-is-up-{attempt}").write_text(str(os.getpid()))
        wait_for(stop)
        checkpoint(config, 3)
        return 75

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def is_killed_once(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        if not (config.run_dir / "checkpoints").is_dir():
            checkpoint(config, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        until_inference_listens(config, attempt)
        return 0

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def is_always_killed(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def crashes(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        raise ZeroDivisionError("a bug")

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def is_misconfigured(run_dir: str, attempt: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        raise ConfigError("model.path=x: no such folder")

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def hangs(run_dir: str, attempt: int) -> int:
    """Ignore every request to stop."""

    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        (config.run_dir / f"trainer-is-up-{attempt}").write_text(str(os.getpid()))
        time.sleep(600)
        return 0

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def serves(run_dir: str, attempt: int, node: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        (config.run_dir / f"inference-listens-{attempt}").touch()
        wait_for(stop)
        return 0

    return play("inference", body, run_dir=run_dir, attempt=attempt, node=node)


def has_too_many_failures(run_dir: str, attempt: int, node: int) -> int:
    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        raise TooManyInfraFailures("sandbox_start 36 of 40")

    return play("inference", body, run_dir=run_dir, attempt=attempt, node=node)


def launch(run_dir: str, trainer: str, inference: str = "serves") -> int:
    """Be the launcher, in a process that a test can signal."""
    from launch.run_dir import RunDir
    from launch.supervise import supervise

    roles = {"trainer": globals()[trainer], "inference": globals()[inference]}
    return supervise(RunDir.open(run_dir), ["test"], began="started", roles=roles)
