"""Watches the launch attempts of a run on this machine until a verdict ends it.

A dead trainer is started again while the engines stay; another launch attempt begins where the
verdict says `requeue`. Ctrl-C asks the roles to save; a second one kills them.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config import RunConfig
from launch.attempt import ENDING, Attempt
from launch.command import say
from launch.progress import Bar, EventTail, Standing
from launch.roles import inference_role, trainer_role
from launch.run_dir import RunDir, begin_attempt
from launch.signals import StopFlag
from launch.sweep import sweep_run
from slurm import exit_record
from slurm.exit_record import ExitRecord
from slurm.local import HetLocalExecutor, HetLocalJob
from slurm.outcomes import Task
from slurm.verdict import Asked, Verdict

POLL_S = 0.2


Roles = Mapping[str, Callable[..., int]]
ROLES: Roles = {"trainer": trainer_role, "inference": inference_role}


def supervise(run: RunDir, argv: Sequence[str], *, began: str, roles: Roles = ROLES) -> int:
    """Run launch attempts until one ends the run; return the command's exit code.

    roles: functions of (run_dir, attempt), and of node where they have that parameter.
    """
    config = run.config()
    run.stop_file.unlink(missing_ok=True)
    is_by_person = True
    sweep_run(run.path)
    with StopFlag(run.stop_file) as stop, Bar(run.name, config.training.steps) as bar:
        while True:
            number = begin_attempt(run, argv)
            launch = Launch(run=run, config=config, number=number, stop=stop, bar=bar, roles=roles)
            verdict = launch.play(began, is_by_person=is_by_person)
            if verdict.action != "requeue":
                break
            bar.say(f"launch attempt {number} ended: {verdict.reason}; beginning another")
            began, is_by_person = verdict.reason, False
            if stop.cause == "USR2":
                stop.reset()
    sweep_run(run.path)
    _tell(run, number, verdict)
    return verdict.code


def _tell(run: RunDir, number: int, verdict: Verdict) -> None:
    say(f"{run.name}: {verdict.reason}")
    if verdict.code == exit_record.SAVED:
        say(f"$ agentrl resume {run.path}")
    elif verdict.code:
        say(f"logs: {run.attempt(number) / 'logs'}")


@dataclass(kw_only=True)
class Launch:
    """One launch attempt's processes: started, told to stop, started again, ended."""

    run: RunDir
    config: RunConfig
    number: int
    stop: StopFlag
    bar: Bar
    roles: Roles
    asked_at: float = 0.0
    job: HetLocalJob = field(init=False)
    _taken: set[Task] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.run.attempt(self.number)

    @property
    def asked(self) -> Asked:
        if not self.stop():
            return ""
        return "limit" if self.stop.cause == "USR2" else "person"

    def play(self, began: str, *, is_by_person: bool) -> Verdict:
        """Act on each end of a role, leave nothing running, write the ledger's line."""
        step_begin = self.run.checkpoint_step()
        self.job = self._submit()
        attempt = Attempt(
            run=self.run,
            number=self.number,
            began=began,
            is_by_person=is_by_person,
            step_begin=step_begin,
            job=self.job.job_id,
        )
        try:
            attempt.tell_begin()
            verdict = self._watch(attempt)
            self._end_rest(attempt)
        finally:
            self.job.cancel()
        attempt.close(verdict)
        return verdict

    def _submit(self) -> HetLocalJob:
        executor = HetLocalExecutor(self.folder / "job", logs=self.folder / "logs")
        nodes = {"inference": self.config.rollout.nodes}
        executor.update_parameters(nodes=nodes, grace_s=self.config.grace_s)
        arguments = (str(self.run.path), self.number)
        return executor.submit(
            {name: functools.partial(role, *arguments) for name, role in self.roles.items()}
        )

    def _watch(self, attempt: Attempt) -> Verdict:
        """Wait for ends and act on them until a verdict ends the attempt."""
        tail, standing = EventTail(self.run.path / "events"), Standing()

        def show() -> None:
            standing.add(tail.read())
            self.bar.update(standing.step, standing.line())

        while True:
            show()
            self._pass_on()
            for record in self._new_records(attempt):
                verdict = attempt.verdict(record, self.asked)
                if verdict.action in ENDING:
                    show()
                    return verdict
                self._act(record, verdict)
            time.sleep(POLL_S)

    def _act(self, record: ExitRecord, verdict: Verdict) -> None:
        self.bar.say(verdict.reason)
        if verdict.action in ("restart_trainer", "restart_inference"):
            self._taken.discard((record.role, record.node))
            self.job.start(record.role, record.node)

    def _pass_on(self) -> None:
        """Hand a request to stop on once; kill after the grace period or when asked again."""
        if not self.asked:
            return
        if not self.asked_at:
            self.asked_at = time.monotonic()
            self.bar.say(
                f"asked to stop ({self.stop.cause}); the roles have {self.config.grace_s:g} s to "
                "save. Ctrl-C again kills them"
            )
            self.stop.count = 1
            number = signal.SIGUSR2 if self.asked == "limit" else signal.SIGTERM
            for role in self.job.roles:
                self.job.signal(role, number)
        elif self.stop.count > 1 or time.monotonic() - self.asked_at > self.config.grace_s:
            self.job.kill("trainer")

    def _new_records(self, attempt: Attempt) -> list[ExitRecord]:
        """Return the records of roles that have ended since, the trainer's first."""
        ended = {task: code for task, code in self.job.ended().items() if task not in self._taken}
        self._taken.update(ended)
        trainer_first = sorted(ended.items(), key=lambda one: one[0][0] != "trainer")
        return [attempt.recorded(role, node, code) for (role, node), code in trainer_first]

    def _end_rest(self, attempt: Attempt) -> None:
        """Ask the roles that still run to leave, for the grace period; a second Ctrl-C cuts it."""
        for role in self.job.roles:
            self.job.signal(role, signal.SIGTERM)
        deadline = time.monotonic() + self.config.grace_s
        while not self.job.done() and time.monotonic() < deadline and self.stop.count < 2:
            time.sleep(POLL_S / 4)
        self._new_records(attempt)
