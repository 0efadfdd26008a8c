"""`agentrl stop RUN`: ask a run to save and end, and wait until it has."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from agentrl.errors import LaunchError, WaitTimeout
from agentrl.handoff.publish import publish_bytes
from launch import submission
from launch.command import guard, parser, say
from launch.jobs import living
from launch.run_dir import RunDir, is_living, launcher_of
from launch.status import UNKNOWN, Place, place_of
from slurm import sbatch

POLL_S = 0.2
JOB_POLL_S = 1.0
"""Between questions to Slurm, which has others to answer."""


def main(argv: Sequence[str]) -> int:
    """Write the run's stop file; its roles poll it. Raises WaitTimeout past the deadline.

    A job that only waits in the queue is cancelled: there is nothing to save.
    """
    arguments = parser("stop", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    arguments.add_argument("--deadline-s", type=float, help="longest wait (default: grace_s + 30)")
    given = arguments.parse_args(argv)
    run = RunDir.open(given.run)
    wait_s = run.config().grace_s + 30 if given.deadline_s is None else given.deadline_s
    place = place_of(run)
    if place.state == UNKNOWN:
        raise LaunchError(f"run {run.path}: {place.components}; ask again when Slurm answers")
    if not place.is_living:
        say(f"{run.name}: nothing of it runs")
        return 0
    if place.job:
        return stop_job(run, place, wait_s)
    stop_here(run, wait_s)
    say(f"{run.name}: ended at step {run.checkpoint_step()}")
    return 0


def stop_here(run: RunDir, wait_s: float) -> None:
    """End a run of this machine."""
    launcher = launcher_of(run, run.attempts()[-1])
    publish_bytes(run.stop_file, b"")
    deadline = time.monotonic() + wait_s
    while is_living(launcher):
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"run {run.path}: its launcher (pid {launcher['pid']}) still runs after "
                f"{wait_s:g} s; a second Ctrl-C there, or `kill` of that pid, ends it"
            )
        time.sleep(POLL_S)


def stop_job(run: RunDir, place: Place, wait_s: float) -> int:
    """End a run's job, and the rest of its chain."""
    publish_bytes(run.stop_file, b"")
    queued = submission.newest(run)
    for job, state in living(queued.jobs if queued else ()).items():
        if state == "PENDING":
            sbatch.cancel(job)
            say(f"{run.name}: cancelled job {job}, which was waiting")
    deadline = time.monotonic() + wait_s
    while left := living([place.job]):
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"run {run.path}: job {place.job} is {left[place.job]} after {wait_s:g} s; its log "
                f"may say why, and `scancel {place.job}` ends it without saving"
            )
        time.sleep(JOB_POLL_S)
    say(f"{run.name}: ended at step {run.checkpoint_step()}")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
