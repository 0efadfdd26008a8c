"""ledger.jsonl: one line a launch attempt, why it began, why it ended, the step at both ends."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slurm.files import append_line

NAME = "ledger.jsonl"


class LedgerLine(msgspec.Struct, kw_only=True, frozen=True):
    """One finished launch attempt."""

    attempt: int
    began: str
    """Why: `started`, `resumed`, or the verdict that asked for it."""
    is_by_person: bool
    """A person began it; the count of attempts without progress starts anew there."""
    ended: str
    """Why, in the verdict's words."""
    action: str
    """What the verdict asked for: `done`, `requeue`, `stop`; `lost` where none was reached."""
    code: int
    step_begin: int
    """Step of the newest checkpoint when it began; 0 without one."""
    step_end: int
    job: str = ""
    """Slurm's job id, or the local one."""
    restarts: int = 0
    """Roles started again inside it."""
    started: float = 0.0
    finished: float = 0.0

    @property
    def has_progress(self) -> bool:
        return self.step_end > self.step_begin


def append(run_dir: Path, line: LedgerLine) -> None:
    append_line(run_dir / NAME, msgspec.json.encode(line))


def read(run_dir: Path) -> list[LedgerLine]:
    """Return the attempts in order; a torn or foreign line is passed over."""
    path = run_dir / NAME
    if not path.is_file():
        return []
    lines = []
    for raw in path.read_bytes().split(b"\n"):
        try:
            lines.append(msgspec.json.decode(raw, type=LedgerLine))
        except msgspec.DecodeError:
            continue  # a crash tore it; the attempt's folder still has its exit records
    return lines


def attempts_without_progress(history: list[LedgerLine] | tuple[LedgerLine, ...]) -> int:
    """Count the newest attempts in a row that advanced no checkpoint.

    It counts no further back than the last one that a person began: who resumes a stopped run
    has looked at it.
    """
    count = 0
    for line in reversed(history):
        if line.has_progress:
            break
        count += 1
        if line.is_by_person:
            break
    return count
