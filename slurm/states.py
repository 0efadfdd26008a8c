"""What Slurm says of jobs: one batched squeue a poll, and sacct for those that it has forgotten.

Every state of Slurm's has its place here. One that is new to us is shown raw and never counted
as an end; nor is silence: a job that nobody knows is left out, and its own result files decide.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.errors import QueryError
from slurm.sbatch import call

LIVE = (
    "RUNNING",
    "COMPLETING",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
    "SUSPENDED",
    "STOPPED",
    "CONFIGURING",
    "POWER_UP_NODE",
    "EXPEDITING",
    "UPDATE_DB",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
    "PENDING",
)
"""The job holds nodes or will; the first in this order is the job's."""
ENDED = (
    "FAILED",
    "NODE_FAIL",
    "BOOT_FAIL",
    "LAUNCH_FAILED",
    "RECONFIG_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "CANCELLED",
    "PREEMPTED",
    "REVOKED",
    "COMPLETED",
)
"""The job is over; the worst, first in this order, is the job's."""
REQUEUED_BY_SLURM = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
"""Ends after which a component may be seen just before Slurm puts it back into the queue."""
SQUEUE = "%i|%A|%T|%N|%P|%L|%r"
SACCT = "JobID,JobIDRaw,State,NodeList,Partition"
NO_ACCOUNTING = "accounting storage is disabled"
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentState:
    """One component as Slurm sees it; a plain job has one, with index 0."""

    index: int
    job_id: str
    """The component's own id; only the first one's can be steered by."""
    state: str
    """One word of Slurm's, in capitals."""
    nodes: str = ""
    """Slurm's node list, such as inf[0-2]; empty before it starts."""
    partition: str = ""
    time_left: str = ""
    reason: str = ""
    """Why it waits, in Slurm's word; empty when it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """A job, its components in order."""

    job_id: str
    """The leader's."""
    components: tuple[ComponentState, ...]

    @property
    def state(self) -> str:
        """A live component's state if there is one, else the worst; an unknown word wins."""
        return worst(
            component.state for component in self.components if component not in self.stranded
        )

    @property
    def is_done(self) -> bool:
        return self.state in ENDED

    @property
    def stranded(self) -> tuple[ComponentState, ...]:
        """Components that wait for ever: requeued alone, after the batch script had ended."""
        first = self.components[0]
        if first.index or first.state not in ENDED or first.state in REQUEUED_BY_SLURM:
            return ()
        return tuple(one for one in self.components[1:] if one.state == "PENDING")


def worst(states: Iterable[str]) -> str:
    """Fold the components' states into the job's. UNKNOWN when there is none."""
    found = [state.upper() for state in states]
    strange = [state for state in found if state not in LIVE and state not in ENDED]
    known = [state for state in (*LIVE, *ENDED) if state in found]
    return next(iter((*strange, *known)), "UNKNOWN")


def query(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Ask once for all jobs; return those that Slurm knows by the leader's id.

    What squeue has forgotten (MinJobAge after its end) is asked of sacct, where there is
    accounting. Raises QueryError when Slurm does not answer: that says nothing about a job.
    """
    wanted = list(dict.fromkeys(job_ids))
    if not wanted:
        return {}
    found = parse_squeue(_squeue(wanted))
    if missing := [job for job in wanted if job not in found]:
        found |= parse_sacct(_sacct(missing))
    return {job: found[job] for job in wanted if job in found}


def parse_squeue(text: str) -> dict[str, JobState]:
    """Read lines of SQUEUE, such as `6+1|7|RUNNING|inf[0-2]|inference|58:01|None`."""
    components: dict[str, list[ComponentState]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 6)
        if len(fields) != 7 or not (place := _place(fields[0])):
            continue  # an array's task, or a site's banner
        leader, index = place
        reason = "" if fields[6] in ("None", "(null)") else fields[6]
        components.setdefault(leader, []).append(
            ComponentState(
                index=index,
                job_id=fields[1],
                state=one_word(fields[2]),
                nodes=fields[3].replace("(null)", ""),
                partition=fields[4],
                time_left=fields[5],
                reason=reason,
            )
        )
    return _jobs(components)


def parse_sacct(text: str) -> dict[str, JobState]:
    """Read lines of SACCT, such as `11+1|12|CANCELLED by 1000|inf0|inference`; no steps."""
    components: dict[str, list[ComponentState]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 5 or not (place := _place(fields[0])):
            continue
        leader, index = place
        nodes = "" if fields[3] == "None assigned" else fields[3]
        components.setdefault(leader, []).append(
            ComponentState(
                index=index,
                job_id=fields[1],
                state=one_word(fields[2]),
                nodes=nodes,
                partition=fields[4],
            )
        )
    return _jobs(components)


def one_word(state: str) -> str:
    """Return the state's name without what a source adds: `CANCELLED by 1000`, `FAILED+`."""
    words = state.upper().split()
    return words[0].rstrip("+") if words else "UNKNOWN"


def _place(job_id: str) -> tuple[str, int] | None:
    """Return (leader, index) of `6` or `6+1`; None for a step, an array's task, a header."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", job_id)
    return (match[1], int(match[2] or 0)) if match else None


def _jobs(components: dict[str, list[ComponentState]]) -> dict[str, JobState]:
    return {
        leader: JobState(job_id=leader, components=tuple(sorted(parts, key=lambda one: one.index)))
        for leader, parts in components.items()
    }


def _squeue(job_ids: Sequence[str]) -> str:
    ids = ",".join(job_ids)
    done = _ask(["squeue", "--noheader", "--states=all", f"--jobs={ids}", f"--format={SQUEUE}"])
    if not done.returncode:
        return done.stdout
    if "invalid job id" in done.stderr.lower():  # all of them are forgotten
        return ""
    raise QueryError(f"squeue exited {done.returncode}: {done.stderr.strip()}")


def _sacct(job_ids: Sequence[str]) -> str:
    ids = ",".join(job_ids)
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={ids}"]
    if shutil.which("sacct") is None:
        return ""
    done = _ask([*words, f"--format={SACCT}"])
    if done.returncode and NO_ACCOUNTING not in done.stderr.lower():
        raise QueryError(f"sacct exited {done.returncode}: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout


def _ask(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return call(words, error=QueryError, timeout_s=TIMEOUT_S)
