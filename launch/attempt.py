"""One launch attempt as its launcher acts on it: records, verdict, ledger line and event.

The batch script (launch.host) and the supervisor of this machine (launch.supervise) share it; who
ended, and who asked for the end, each finds out in its own way.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentrl.errors import LaunchError
from agentrl.events import EventWriter, LaunchAttempt, now
from launch.run_dir import RunDir, launcher_of
from slurm import exit_record, ledger
from slurm.exit_record import ExitRecord
from slurm.verdict import Asked, Limits, Situation, Verdict, decide

ENDING = ("done", "requeue", "stop")
"""Actions of a verdict after which the attempt is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What its launcher knows of it from the beginning."""

    run: RunDir
    number: int
    began: str
    """Why: `started`, `resumed`, or the verdict that asked for it."""
    is_by_person: bool
    step_begin: int
    """Step of the newest checkpoint then."""
    job: str
    """Slurm's job id, or the local one."""
    started: float = field(default_factory=time.time)

    @classmethod
    def of(cls, run: RunDir, number: int) -> Attempt:
        """Read it from its launcher.json, as each question of a batch script does."""
        launcher = launcher_of(run, number)
        return cls(
            run=run,
            number=number,
            began=str(launcher.get("began", "")),
            is_by_person=launcher.get("is_by_person") is True,
            step_begin=int(_number(launcher.get("step_begin"))),
            job=str(launcher.get("job", "")),
            started=_number(launcher.get("started")),
        )

    @property
    def folder(self) -> Path:
        return self.run.attempt(self.number)

    def recorded(self, role: str, node: int, code: int) -> ExitRecord:
        """Return the record of a role that ended with `code`, made up where it left none."""
        found = exit_record.read(self.folder, role, node)
        if found is None:
            step = self.run.checkpoint_step()
            found = exit_record.synthesise(role, node, code, step=step, started=self.started)
            exit_record.write(self.folder, found)
        return found

    def verdict(self, newest: ExitRecord, asked: Asked) -> Verdict:
        """Decide what follows from the end of a role; its record gives way to a next process's."""
        situation = Situation(
            records=records_of(self.folder, newest),
            history=tuple(ledger.read(self.run.path)),
            step_begin=self.step_begin,
            step_now=self.run.checkpoint_step(),
            is_by_person=self.is_by_person,
            asked=asked,
        )
        limits = Limits(
            max_attempts_without_progress=self.run.config().max_attempts_without_progress
        )
        found = decide(situation, limits)
        if found.action in ("restart_trainer", "restart_inference"):
            exit_record.set_aside(self.folder, newest.role, newest.node)
        return found

    def tell_begin(self) -> None:
        self._write_event("begin", self.began, self.step_begin)

    def close(self, verdict: Verdict) -> None:
        """Write the ledger's line. Raises LaunchError if it has one."""
        step = self.run.checkpoint_step()
        if self.number in {line.attempt for line in ledger.read(self.run.path)}:
            raise LaunchError(
                f"attempt {self.number} of run {self.run.path} has its ledger line already"
            )
        line = ledger.LedgerLine(
            attempt=self.number,
            began=self.began,
            is_by_person=self.is_by_person,
            ended=verdict.reason,
            action=verdict.action,
            code=verdict.code,
            step_begin=self.step_begin,
            step_end=step,
            job=self.job,
            restarts=exit_record.restarts(self.folder),
            started=self.started,
            finished=time.time(),
        )
        ledger.append(self.run.path, line)
        self._write_event("end", verdict.reason, step)

    def _write_event(self, phase: str, reason: str, step: int) -> None:
        events = EventWriter(self.run.path / "events", "launch", node="0")
        at = now()
        events.write(
            LaunchAttempt(
                attempt=self.number, phase=phase, reason=reason, step=step, start=at, end=at
            )
        )
        events.close()


def records_of(folder: Path, newest: ExitRecord) -> tuple[ExitRecord, ...]:
    """Return every end of a role in this attempt, oldest first, `newest` last."""
    found = []
    for name in sorted(os.listdir(folder / "exit")):
        if name.endswith(".json") and not name.startswith("."):
            data = (folder / "exit" / name).read_bytes()
            found.append(msgspec.json.decode(data, type=ExitRecord))
    others = [one for one in found if one != newest]
    return (*sorted(others, key=lambda one: one.ended), newest)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
