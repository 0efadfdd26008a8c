"""What Slurm says of a run's jobs, for those who only ask whether they live."""

from __future__ import annotations

from collections.abc import Iterable

from slurm import states


def states_of(jobs: Iterable[str]) -> dict[str, str]:
    """Ask Slurm once for the state of each job; those it has forgotten are left out."""
    return {job: found.state for job, found in states.query(filter(None, jobs)).items()}


def living(jobs: Iterable[str]) -> dict[str, str]:
    """Return those that are queued or running, with their states."""
    found = states.query(filter(None, jobs))
    return {job: one.state for job, one in found.items() if not one.is_done}
