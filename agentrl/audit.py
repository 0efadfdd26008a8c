"""Proves from a run's files alone that no draw was lost, and none trained twice.

Every draw up to the highest one started is trained, filtered with a reason, waiting in the spool,
or to be issued again; which is which is in the newest good checkpoint and in the spool.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agentrl import events
from agentrl.errors import RecordError
from agentrl.handoff.spool import list_files, read_group
from agentrl.rollout.draws import DrawSet
from agentrl.training.checkpoint import read_consumed, verify
from agentrl.weights.version import latest


@dataclass(kw_only=True, slots=True)
class Audit:
    """What was found; `lines` is for people, `problems` is what makes it fail."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(run_dir: Path) -> Audit:
    """Check draws, spool, checkpoints and versions of one run directory; changes nothing."""
    if not (run_dir / "config.yaml").is_file():
        raise RecordError(f"{run_dir}: no config.yaml there; give a run directory, as in runs/demo")
    found = Audit()
    steps = _check_checkpoints(run_dir / "checkpoints", found)
    consumed = _read_consumed(run_dir / "checkpoints", found)
    waiting = _check_spool(run_dir / "spool", consumed, found)
    _check_draws(run_dir, consumed, waiting, found)
    _check_history(steps, found)
    _check_versions(run_dir / "weights", found)
    found.lines += [f"PROBLEM {problem}" for problem in found.problems]
    found.lines.append("audit clean" if found.ok else f"{len(found.problems)} problems")
    return found


def _check_checkpoints(folder: Path, found: Audit) -> list[Path]:
    """Verify each complete checkpoint; return the good ones, oldest first."""
    good = []
    for path in _listed(folder, r"step-\d{6,}"):
        try:
            verify(path)
        except RecordError as error:
            found.problems.append(f"checkpoint: {error}")
            continue
        good.append(path)
    names = ", ".join(path.name for path in good) or "none"
    found.lines.append(f"checkpoints that verify: {names}")
    return good


def _read_consumed(folder: Path, found: Audit) -> dict[int, str]:
    try:
        return read_consumed(folder)
    except RecordError as error:
        found.problems.append(f"consumed draws: {error}")
        return {}


def _check_spool(spool: Path, consumed: dict[int, str], found: Audit) -> set[int]:
    """Read every file; return the draws that wait in it."""
    waiting: set[int] = set()
    for draw, path in list_files(spool):
        if draw in consumed:
            found.problems.append(
                f"spool: {path} of draw {draw} is covered by the checkpoint ({consumed[draw]}) "
                "and still there; resuming deletes it"
            )
        try:
            read_group(path)
        except RecordError as error:
            found.problems.append(f"spool: {error}")
            continue
        if draw in waiting:
            found.problems.append(f"spool: draw {draw} waits twice, once in {path}")
        waiting.add(draw)
    return waiting - consumed.keys()


def _check_draws(run_dir: Path, consumed: dict[int, str], waiting: set[int], found: Audit) -> None:
    """Account for every draw from 0 to the highest one seen anywhere."""
    started, rejected = set[int](), Counter[str]()
    for event in events.read_folder(run_dir / "events", rejected):
        if isinstance(event, events.TrajectoryEvent) and event.draw >= 0:  # evaluation has -1
            started.add(event.draw)
    highest = max((*started, *consumed, *waiting), default=-1)
    counts = Counter(consumed.values())
    again = highest + 1 - len(consumed) - len(waiting)
    found.lines.append(f"draws 0 to {highest}: {highest + 1}")
    found.lines += [f"  {reason}: {count}" for reason, count in counts.most_common()]
    found.lines += [f"  waiting in the spool: {len(waiting)}", f"  to be issued again: {again}"]
    for reason in counts:
        if not (reason == "trained" or re.fullmatch(r"filtered:.+", reason, re.DOTALL)):
            found.problems.append(
                f"draws: {counts[reason]} are consumed without a reason: {reason!r}"
            )
    if rejected:
        table = ", ".join(f"{why} {count}" for why, count in rejected.most_common())
        found.lines.append(f"event lines that could not be read: {table}")


def _check_history(checkpoints: list[Path], found: Audit) -> None:
    """A later checkpoint keeps what an earlier one consumed, with the same reason."""
    before: dict[int, str] = {}
    for path in checkpoints:
        try:
            after = read_consumed(path)
        except RecordError as error:
            found.problems.append(f"consumed draws: {error}")
            continue
        lost = DrawSet(draw for draw in before if draw not in after)
        changed = DrawSet(draw for draw in before if after.get(draw, before[draw]) != before[draw])
        if lost.count:
            found.problems.append(f"draws: {path.name} forgot {lost.to_ranges()}: trained twice")
        if changed.count:
            found.problems.append(f"draws: {path.name} tells {changed.to_ranges()} otherwise")
        before = after


def _check_versions(weights: Path, found: Audit) -> None:
    """The announced version is whole, byte for byte."""
    try:
        announced = latest(weights)
    except RecordError as error:
        found.problems.append(f"weights: {error}")
        return
    if announced is None:
        found.lines.append("weights: none announced yet")
        return
    for name, wanted in announced.files.items():
        path = announced.folder / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            found.problems.append(f"weights: {error}")
            continue
        if digest != wanted:
            found.problems.append(f"weights: {path} has another sha256 than LATEST.json announces")
    found.lines.append(f"weights: version {announced.version} of attempt {announced.attempt}")


def _listed(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
