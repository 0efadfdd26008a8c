"""What was handed to Slurm for a run: submissions/NNNN/ with its script, its log and its job ids.

A submission lives through requeues (the same job again) and chains (several jobs, one after the
other); each of these lives is a launch attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentrl.errors import LaunchError, RecordError
from launch.jobs import living
from launch.run_dir import RunDir
from slurm.files import listed, publish

FOLDER = "submissions"
FILE = "submission.json"


class Submission(msgspec.Struct, kw_only=True, frozen=True):
    """submission.json: written once sbatch has answered."""

    number: int
    jobs: list[str]
    """Ids of the leaders, in the order of the chain; one unless cluster.requeue=chain."""
    began: str
    """`started` or `resumed`."""
    cluster: str
    argv: list[str] = []
    submitted: float = 0.0


def folder_of(run: RunDir, number: int) -> Path:
    return run.path / FOLDER / f"{number:04d}"


def numbers(run: RunDir) -> list[int]:
    folder = run.path / FOLDER
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def next_number(run: RunDir) -> int:
    return max(numbers(run), default=0) + 1


def record(run: RunDir, number: int, jobs: Sequence[str], **facts: object) -> Submission:
    """Publish what was queued."""
    found = msgspec.convert(
        {"number": number, "jobs": list(jobs), "submitted": time.time(), **facts}, Submission
    )
    publish(folder_of(run, number) / FILE, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found


def newest(run: RunDir) -> Submission | None:
    """Return the newest submission that was queued. Raises RecordError if its file is torn."""
    for number in reversed(numbers(run)):
        path = folder_of(run, number) / FILE
        if listed(path):
            try:
                return msgspec.json.decode(path.read_bytes(), type=Submission)
            except msgspec.DecodeError as error:
                raise RecordError(f"{path}: not readable: {error}; is it edited?") from error
    return None


def refuse_if_living(run: RunDir) -> None:
    """Raise LaunchError if a job of this run is queued or runs."""
    found = newest(run)
    if found is None:
        return
    for job, state in living(found.jobs).items():
        raise LaunchError(
            f"run {run.path}: its job {job} is {state}; `agentrl stop {run.path}` ends it, "
            f"`agentrl status {run.path}` shows it"
        )
