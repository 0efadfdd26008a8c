"""Slurm's own words: `sacct --parsable2`, slurmctld's log, and slurmstepd's lines in job logs.

Components of a heterogeneous job (`11+0`, `11+1`) are one launch attempt; its state is the worst of
theirs. Steps (`11+0.batch`) are no attempts. A requeued job is listed again with --duplicates.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl import events
from analysis.sources.adapted import Adapted, seconds

_ID = re.compile(r"(?P<leader>\d+)(?:\+(?P<offset>\d+)|_(?P<task>[\d\[\]%,-]+))?(?P<step>\..*)?$")
ORDER = ("COMPLETED", "PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REVOKED",
         "RESIZING", "PREEMPTED", "CANCELLED", "DEADLINE", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL",
         "BOOT_FAIL", "FAILED")  # fmt: skip
"""States from best to worst."""
NEEDED = ("JobID", "State", "Start", "End")
TIMES = ("Start", "End", "Submit")
_NONE = ("", "Unknown", "None", "N/A")
_CONTROLLER = re.compile(r"^(?:slurmctld: )?\[(?P<time>[\dT:.-]+)\] (?P<text>.*)")
_TOLD = {
    "requeued": re.compile(r"[Rr]equeu\w*.*JobI?d?=?\s?(\d+)|JobId=(\d+)\S* .*[Rr]equeu"),
    "node failed": re.compile(r"[Nn]ode (\S+) not responding|error: Nodes (\S+) not responding"),
    "time limit": re.compile(r"Time limit exhausted for JobId=(\d+)"),
    "preempted": re.compile(r"[Pp]reempted JobId=(\d+)"),
}
_PASSED = re.compile(
    r"sched|backfill|_slurm_rpc|_job_complete|job_complete|update_node|Running as|debug|"
    r"SchedulerParameters|Registering|node_did_resp|priority|Recovered|slurmctld version|cleanup"
)
_STEPD = re.compile(
    r"slurmstepd: (?:error: )?\*\*\* (?:JOB|STEP) (?P<job>\d+)\S* ON (?P<node>\S+) CANCELLED AT "
    r"(?P<time>\S+?)(?: DUE TO (?P<why>[A-Z _]+)[^*]*)?\s?\*\*\*"
)
_OOM = re.compile(r"slurmstepd: error: .*oom[- _]kill", re.IGNORECASE)
_SRUN = re.compile(r"srun: error: (?P<node>\S+): task \S+ (?P<what>.*)")


class Sacct:
    """Accounting rows with a header, fields parted by `|`."""

    name = "sacct"

    def fits(self, path: Path, head: str) -> bool:
        del path
        first = head.partition("\n")[0].rstrip("|").split("|")
        return "JobID" in first and "State" in first

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add a begin and an end of each launch attempt, and its wait in the queue as a drop."""
        for path in paths:
            lines = path.read_text(errors="replace").splitlines() or [""]
            header = lines[0].rstrip("|").split("|")
            missing = [name for name in NEEDED if name not in header]
            if missing:
                into.refuse(f"{path.name} without {', '.join(missing)}", lines[0])
                continue
            self._attempts(header, lines[1:], into)
        into.notes.append("its times name no zone; UTC was assumed.")

    def _attempts(self, header: list[str], lines: list[str], into: Adapted) -> None:
        found: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
        for line in lines:
            into.lines += 1
            fields = line.split("|")[: len(header)]
            row = dict(zip(header, fields, strict=False))
            job = _ID.match(row.get("JobID", ""))
            if job is None or len(fields) < len(header):
                into.refuse("row of another width, or without a job id", line)
            elif job["step"]:
                into.passed["steps"] += 1
            elif row["Start"] in _NONE:
                into.passed["jobs that did not start"] += 1
            elif all(_is_time(row.get(name, ""), line, into) for name in TIMES):
                into.known += 1
                found[job["leader"], row["Start"]].append(row)
        for number, ((leader, start), rows) in enumerate(sorted(found.items()), 1):
            into.events += _attempt(number, leader, start, rows)


class SlurmLog:
    """slurmctld's log, and what slurmstepd and srun write into a job's own log."""

    name = "Slurm log"

    def fits(self, path: Path, head: str) -> bool:
        return bool(_STEPD.search(head)) or "slurmctld" in path.name or "slurmctld" in head[:400]

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add a signal event for each cause that ended a job or lost a node."""
        for path in paths:
            with path.open(errors="replace") as file:
                for line in file:
                    into.lines += 1
                    self._line(line, into)

    def _line(self, line: str, into: Adapted) -> None:
        controller = _CONTROLLER.match(line)
        if stepd := _STEPD.search(line):
            why = (stepd["why"] or "cancelled").strip().lower()
            _add(into, why, f"job {stepd['job']}", into.moment(stepd["time"], line))
        elif _OOM.search(line):
            _add(into, "out of memory", line.strip()[:120], 0.0)
        elif srun := _SRUN.search(line):
            _add(into, f"srun: {srun['what']}", srun["node"], 0.0)
        elif controller is None:
            into.refuse("no line of Slurm", line)
        else:
            self._told(controller, line, into)

    def _told(self, controller: re.Match[str], line: str, into: Adapted) -> None:
        for what, sign in _TOLD.items():
            if found := sign.search(controller["text"]):
                who = next((group for group in found.groups() if group), "")
                _add(into, what, who, into.moment(controller["time"], line))
                return
        if _PASSED.search(controller["text"]):
            into.passed["scheduling"] += 1
        else:
            into.refuse("no known line of slurmctld", line)


def _attempt(
    number: int, leader: str, start: str, rows: list[Mapping[str, str]]
) -> Iterable[events.Event]:
    begin = seconds(start)
    state = max((_state(row["State"]) for row in rows), key=_badness)
    ends = [seconds(row["End"]) for row in rows if row["End"] not in _NONE]
    submits = [row["Submit"] for row in rows if row.get("Submit", "") not in _NONE]
    queued = begin - max(map(seconds, submits)) if submits else 0.0
    told = f"Slurm job {leader}, {len(rows)} components, queued {queued:.0f} s"
    yield events.LaunchAttempt(attempt=number, phase="begin", reason=told, start=begin, end=begin)
    if ends:
        end = max(ends)
        yield events.LaunchAttempt(attempt=number, phase="end", reason=state, start=end, end=end)


def _state(text: str) -> str:
    return text.split()[0].rstrip("+") if text.split() else ""


def _badness(state: str) -> int:
    """Rank a state; one that is not listed is the worst."""
    return ORDER.index(state) if state in ORDER else len(ORDER)


def _is_time(text: str, line: str, into: Adapted) -> bool:
    return text in _NONE or into.moment(text, line) is not None


def _add(into: Adapted, name: str, action: str, at: float | None) -> None:
    """Add a signal event, unless its time was none."""
    if at is not None:
        into.known += 1
        into.events.append(events.Signal(name=name, action=action, start=at, end=at))
