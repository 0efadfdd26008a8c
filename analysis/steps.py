"""Which steps count: a step done again after a resume takes the place of the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from agentrl import events
from analysis.run_files import Run

Mark = events.Step | events.CheckpointEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps that led to the newest weights, in order."""

    steps: tuple[events.Step, ...]
    resumes: tuple[int, ...]
    """Steps after which a later launch attempt went on."""
    superseded: int
    """Steps that a crash undid."""


def of_run(run: Run) -> Lineage:
    """Return the lineage of a run's steps."""
    marks: list[Mark] = [*run.of(events.CheckpointEvent), *run.of(events.Step)]
    return lineage(sorted(marks, key=lambda mark: mark.end or mark.start))


def steady_from(run: Run) -> float:
    """Return the time when the steady state began: the start of the first step that counts."""
    line = of_run(run)
    counted = [
        step.start
        for step, counts in zip(line.steps, steady(line.steps, line.resumes), strict=True)
        if counts
    ]
    return min(counted, default=-inf) if len(line.steps) >= 5 else -inf


def groups_per_step(run: Run) -> int:
    """Return how many draws a step took: as its events say, else as the config does, else 1."""
    told = [step.metrics["groups"] for step in run.of(events.Step) if step.metrics.get("groups")]
    if told:
        return round(median(told))
    return run.config.training.groups_per_step if run.config else 1


def lineage(found: Sequence[Mark]) -> Lineage:
    """Follow `found`, ordered by end, through every resume."""
    kept: list[events.Step] = []
    resumes: list[int] = []
    undone = 0
    for event in found:
        back_to = _goes_back_to(event, kept)
        if back_to is not None:
            undone += sum(step.step > back_to for step in kept)
            kept = [step for step in kept if step.step <= back_to]
            resumes.append(back_to)
        if isinstance(event, events.Step):
            kept.append(event)
    return Lineage(steps=tuple(kept), resumes=tuple(sorted(set(resumes))), superseded=undone)


def _goes_back_to(event: Mark, kept: Sequence[events.Step]) -> int | None:
    """Return the step that training resumes from with this event, if it does."""
    if isinstance(event, events.CheckpointEvent) and event.phase == "loaded" and event.step > 0:
        return event.step
    if isinstance(event, events.Step) and kept and event.step <= kept[-1].step:
        return event.step - 1
    return None


def steady(steps: Sequence[events.Step], resumes: Sequence[int]) -> list[bool]:
    """Tell for each step whether it counts for means: warm-up does not.

    Left out are the first tenth (at least one step) and the first step after a resume; with
    under five steps all count.
    """
    if len(steps) < 5:
        return [True] * len(steps)
    warm_up = max(1, len(steps) // 10)
    after = {step + 1 for step in resumes}
    return [i >= warm_up and step.step not in after for i, step in enumerate(steps)]
