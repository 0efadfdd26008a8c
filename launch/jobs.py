"""What Slurm says of a run's jobs, for people and for those who only ask whether they live."""

from __future__ import annotations

from collections.abc import Iterable

from slurm import states
from slurm.states import ComponentState, JobState

ROLES = ("trainer", "inference")
"""Of the components, in order; a homogeneous job has one for both."""


def states_of(jobs: Iterable[str]) -> dict[str, str]:
    """Ask Slurm once for the state of each job; those it has forgotten are left out."""
    return {job: found.state for job, found in states.query(filter(None, jobs)).items()}


def living(jobs: Iterable[str]) -> dict[str, str]:
    """Return those that are queued or running, with their states."""
    found = states.query(filter(None, jobs))
    return {job: one.state for job, one in found.items() if not one.is_done}


def chosen(found: Iterable[JobState]) -> JobState | None:
    """Return the job of a submission that matters now: the first that lives, else the last."""
    jobs = list(found)
    return next((job for job in jobs if not job.is_done), jobs[-1] if jobs else None)


def told(job: JobState) -> dict[str, str]:
    """Return a line on each component, by role."""
    if len(job.components) == 1:
        return {"job": _told(job.components[0])}
    return {_role(one): _told(one) for one in job.components}


def _role(component: ComponentState) -> str:
    return ROLES[component.index] if component.index < len(ROLES) else f"part {component.index}"


def _told(component: ComponentState) -> str:
    where = f" on {component.nodes}" if component.nodes else ""
    left = f", {component.time_left} left" if component.state == "RUNNING" else ""
    why = f" ({component.reason})" if component.reason and component.state == "PENDING" else ""
    return f"{component.state}{where}{left}{why}"
