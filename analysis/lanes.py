"""The spans of a window of a run, each in a lane of its node, as a timeline shows them.

A trajectory takes the lowest lane of its node that is free when it starts. Spans of trajectories
that nobody saw end stand under the name `unfinished`, a lane a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec
import numpy as np

from agentrl import events
from agentrl.events import Event
from analysis.columns import to_arrow, to_events
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.spans import owners_of

PHASES: dict[str, type[Event]] = {
    "sandbox start": events.SandboxStart,
    "set-up": events.Setup,
    "model call": events.ModelCall,
    "command": events.ToolCall,
    "grading": events.Grade,
}
STEP_PARTS = ("wait", "update", "logprob", "publish", "checkpoint")
TRAINER = "trainer"
UNFINISHED = "unfinished"
Facts = dict[str, object]
Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One bar of a timeline; times are seconds since the epoch."""

    node: str
    lane: int
    phase: str
    """A name of PHASES, `trajectory`, `step`, `step part` or `fault`."""
    name: str
    start: float
    end: float
    facts: Facts


def spans(run: Run, within: Bounds) -> list[Span]:
    """Return what was under way in a window, by start; spans that reach over its ends are whole."""
    found = [*_trajectories(run, within), *_phases(run, within), *_trainer(run, within)]
    return sorted(found, key=lambda span: (span.start, span.node, span.lane, span.phase))


def lanes(starts: Sequence[float], ends: Sequence[float], nodes: Sequence[str]) -> list[int]:
    """Give each stretch the lowest lane of its node that is free when it starts."""
    found = [0] * len(starts)
    free: dict[str, list[int]] = {}
    busy: dict[str, list[tuple[float, int]]] = {}
    used: dict[str, int] = {}
    for i in np.argsort(np.asarray(starts, np.float64), kind="stable").tolist():
        node = nodes[i]
        ending, idle = busy.setdefault(node, []), free.setdefault(node, [])
        while ending and ending[0][0] <= starts[i]:
            heappush(idle, heappop(ending)[1])
        if idle:
            found[i] = heappop(idle)
        else:
            found[i] = used.get(node, 0)
            used[node] = found[i] + 1
        heappush(ending, (ends[i], found[i]))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Node and lane of each trajectory."""

    node: list[str]
    lane: list[int]


@remembered
def _places(run: Run) -> _Places:
    owners = owners_of(run)
    node = [f"node {name}" for name in run.store.nodes(events.TrajectoryEvent)]
    return _Places(node=node, lane=lanes(owners.start.tolist(), owners.end.tolist(), node))


def _trajectories(run: Run, within: Bounds) -> Iterator[Span]:
    places = _places(run)
    for i, done in enumerate(run.of(events.TrajectoryEvent)):
        if done.end >= within[0] and done.start <= within[1]:
            facts: Facts = {"task": done.task, "cause": done.cause, "reward": done.reward}
            yield Span(
                node=places.node[i], lane=places.lane[i], phase="trajectory",
                name=f"trajectory {done.trajectory}", start=done.start, end=done.end, facts=facts,
            )  # fmt: skip


def _phases(run: Run, within: Bounds) -> Iterator[Span]:
    owners, places = owners_of(run), _places(run)
    unfinished: dict[str, int] = {}
    for phase, kind in PHASES.items():
        every = owners.spans(kind)
        chosen = np.flatnonzero((every.end >= within[0]) & (every.start <= within[1]))
        some = to_events(kind, every.table.take(to_arrow(chosen)))
        for event, owner in zip(some, every.owner[chosen].tolist(), strict=True):
            facts = _facts(event)
            name = str(facts["trajectory"])
            lane = (
                places.lane[owner] if owner >= 0 else unfinished.setdefault(name, len(unfinished))
            )
            yield Span(
                node=places.node[owner] if owner >= 0 else UNFINISHED, lane=lane, phase=phase,
                name=phase, start=event.start, end=event.end, facts=facts,
            )  # fmt: skip


def _trainer(run: Run, within: Bounds) -> Iterator[Span]:
    """Yield steps and their parts, and faults of engines.

    A step's parts follow each other in the trace; their order in the step is not recorded.
    """
    for step in run.of(events.Step):
        if step.end < within[0] or step.start > within[1]:
            continue
        yield Span(
            node=TRAINER, lane=0, phase="step", name=f"step {step.step}", start=step.start,
            end=step.end, facts=dict(step.metrics),
        )  # fmt: skip
        at = step.start
        for part in STEP_PARTS:
            seconds = getattr(step, f"{part}_s")
            if seconds > 0:
                yield Span(
                    node=TRAINER, lane=1, phase="step part", name=part, start=at, end=at + seconds,
                    facts={},
                )  # fmt: skip
                at += seconds
    for fault in run.of(events.EngineFault):
        at = fault.end or fault.start
        if within[0] <= at <= within[1]:
            yield Span(
                node="engines", lane=0, phase="fault", name=f"fault: {fault.cause}", start=at,
                end=at, facts=_facts(fault),
            )  # fmt: skip


def _facts(event: Event) -> Facts:
    return {k: v for k, v in msgspec.structs.asdict(event).items() if k not in ("start", "end")}
