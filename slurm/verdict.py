"""What happens after a role has ended: a pure decision, the same on this machine and on Slurm.

No sequence of failures goes on for ever: inside a launch attempt the restarts have a budget, and
launch attempts without a new checkpoint are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slurm.exit_record import DONE, FAILED, SAVED, USAGE, ExitRecord
from slurm.ledger import LedgerLine, attempts_without_progress

Action = Literal["wait", "done", "restart_trainer", "restart_inference", "requeue", "gone", "stop"]
"""`gone`: as `requeue`, but Slurm is ending the job already and needs no asking."""
Asked = Literal["", "person", "limit"]
TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_attempts_without_progress: int = 3
    """Launch attempts in a row without a new checkpoint after which the run stops."""
    max_trainer_restarts: int = 3
    """Restarts of the trainer inside one launch attempt."""
    max_inference_restarts: int = 3
    """Restarts of each inference node's role inside one launch attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    action: Action
    reason: str
    code: int = DONE
    """Exit code of the launch when the action is `done` or `stop`."""
    node: int = 0
    """Which node's role to restart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All that a verdict rests on."""

    records: tuple[ExitRecord, ...]
    """Every end of a role in this launch attempt, oldest first; the last one is what is new."""
    history: tuple[LedgerLine, ...] = ()
    """Earlier launch attempts, oldest first."""
    step_begin: int = 0
    """Step of the newest checkpoint when this attempt began."""
    step_now: int = 0
    is_by_person: bool = False
    """A person began this attempt."""
    asked: Asked = ""
    """Who asked for the end: a `person` (signal, stop file), or a time `limit` or preemption."""


def decide(situation: Situation, limits: Limits) -> Verdict:
    """Return what to do now that the last of `situation.records` has come in."""
    newest = situation.records[-1]
    if newest.cause == "usage" or newest.code == USAGE:
        return Verdict(action="stop", reason=_told(newest), code=USAGE)
    if newest.cause == "infra_limit":
        return Verdict(action="stop", reason=_told(newest), code=FAILED)
    if newest.role == TRAINER and newest.code == DONE:
        return Verdict(action="done", reason="the trainer finished")
    if newest.role == TRAINER and newest.code == SAVED:
        return _saved(situation, newest, limits)
    if situation.asked:
        return _died_while_stopping(situation, newest, limits)
    if newest.role != TRAINER:
        return _inference_ended(situation, newest, limits)
    return _trainer_died(situation, newest, limits)


def _saved(situation: Situation, newest: ExitRecord, limits: Limits) -> Verdict:
    where = f"saved at step {situation.step_now}"
    if situation.asked == "limit":
        reason = f"{where} ahead of a time limit or preemption"
        return _next_attempt(situation, newest, limits, reason)
    return Verdict(action="stop", reason=f"{where} as asked", code=SAVED)


def _died_while_stopping(situation: Situation, newest: ExitRecord, limits: Limits) -> Verdict:
    if newest.role != TRAINER:
        return Verdict(action="wait", reason=f"{newest.role} left; the trainer is still saving")
    reason = f"the trainer ended before it had saved ({_told(newest)}); "
    reason += f"the newest checkpoint is of step {situation.step_now}"
    if situation.asked == "limit":
        return _next_attempt(situation, newest, limits, reason)
    return Verdict(action="stop", reason=reason, code=SAVED)


def _inference_ended(situation: Situation, newest: ExitRecord, limits: Limits) -> Verdict:
    if newest.code == DONE:
        return Verdict(action="wait", reason=f"inference on node {newest.node} has no more to do")
    restarts = _starts(situation, newest) - 1
    if newest.cause != "launch" and restarts < limits.max_inference_restarts:
        return Verdict(
            action="restart_inference",
            reason=f"{_told(newest)}; restart {restarts + 1} of {limits.max_inference_restarts}",
            node=newest.node,
        )
    return _next_attempt(situation, newest, limits, _told(newest))


def _trainer_died(situation: Situation, newest: ExitRecord, limits: Limits) -> Verdict:
    earlier = [record for record in situation.records[:-1] if record.role == TRAINER]
    step_before = earlier[-1].step if earlier else situation.step_begin
    progress = newest.step > step_before
    restarts = len(earlier)
    if (progress or newest.cause in ("infra", "killed")) and restarts < limits.max_trainer_restarts:
        return Verdict(
            action="restart_trainer",
            reason=f"{_told(newest)}; restart {restarts + 1} of {limits.max_trainer_restarts} "
            f"from step {newest.step}, engines stay",
            node=newest.node,
        )
    return _next_attempt(situation, newest, limits, _told(newest))


def _next_attempt(situation: Situation, newest: ExitRecord, limits: Limits, reason: str) -> Verdict:
    """Ask for another launch attempt if that can help, else for the end."""
    if situation.step_now > situation.step_begin:
        return Verdict(action="requeue", reason=reason)
    if not newest.is_infra and newest.cause != "saved":
        return Verdict(
            action="stop",
            reason=f"{reason}; no new checkpoint since this attempt began, so it would end alike",
            code=FAILED,
        )
    before = 0 if situation.is_by_person else attempts_without_progress(situation.history)
    if before + 1 < limits.max_attempts_without_progress:
        return Verdict(action="requeue", reason=reason)
    return Verdict(
        action="stop",
        reason=f"{reason}; {before + 1} launch attempts in a row made no new checkpoint "
        f"(max_attempts_without_progress={limits.max_attempts_without_progress})",
        code=FAILED,
    )


def _starts(situation: Situation, newest: ExitRecord) -> int:
    return sum((one.role, one.node) == (newest.role, newest.node) for one in situation.records)


def _told(record: ExitRecord) -> str:
    return record.message or f"{record.role} on node {record.node} exited {record.code}"
