"""A folder of other stacks' logs as one run: each file goes to the adapter that knows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from agentrl import events
from agentrl.events import Event
from analysis.evaluations import Evaluation
from analysis.sources.adapted import Adapted, Source
from analysis.sources.harbor import Harbor
from analysis.sources.mini_swe_agent import UNGRADED, MiniSweAgent
from analysis.sources.sglang import SglangLog, SglangMetrics
from analysis.sources.slime import RolloutDump, SlimeLog
from analysis.sources.slurm import Sacct, SlurmLog
from analysis.sources.swebench import SwebenchReport

SOURCES: tuple[Source, ...] = (
    Sacct(), SwebenchReport(), Harbor(), MiniSweAgent(), RolloutDump(), SglangMetrics(),
    SlimeLog(), SglangLog(), SlurmLog(),
)  # fmt: skip
"""The first that a file fits reads it."""
HEAD = 64 << 10
"""Bytes of a file that are looked at to tell what it is."""
MOST_FILES = 20_000
PICKLES = (".pt", ".pth", ".pkl", ".pickle")
PARTS_OF_OTHERS = ("trajectory.json", "config.json")
"""Files that an adapter reads along with another one."""


def read_folder(folder: Path) -> tuple[list[Event], list[Evaluation], list[str]]:
    """Return the events and evaluations in `folder`, and what is to be said about its files."""
    files: dict[str, list[Path]] = defaultdict(list)
    problems: list[str] = []
    strangers: list[str] = []
    for path in _walk(folder, problems):
        source = _source(path)
        if source:
            files[source.name].append(path)
        elif path.suffix in PICKLES:
            problems.append(f"{path.name} is a pickle, which can run code: not opened.")
        elif path.name not in PARTS_OF_OTHERS:
            strangers.append(path.name)
    if strangers:
        shown = ", ".join(strangers[:8])
        problems.append(f"{len(strangers)} files of no known kind were left out, such as {shown}.")
    found: list[Event] = []
    evaluations: list[Evaluation] = []
    for source in SOURCES:
        if paths := files[source.name]:
            adapted = Adapted()
            source.read(paths, adapted)
            found += adapted.events
            evaluations += adapted.evaluations
            problems += adapted.say(source.name)
    return _graded(found, evaluations), evaluations, problems


def _walk(folder: Path, problems: list[str]) -> Iterator[Path]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != "report"
    )
    if len(paths) > MOST_FILES:
        problems.append(f"only the first {MOST_FILES:,} of {len(paths):,} files were looked at.")
    yield from paths[:MOST_FILES]


def _source(path: Path) -> Source | None:
    with path.open("rb") as file:
        head = file.read(HEAD).decode(errors="replace")
    return next((source for source in SOURCES if source.fits(path, head)), None)


def _graded(found: Sequence[Event], evaluations: Sequence[Evaluation]) -> list[Event]:
    """Give trajectories without a verdict the one that a SWE-bench report has on their task."""
    verdicts = {task: share for each in evaluations for task, share in each.per_task.items()}
    graded: list[Event] = []
    for event in found:
        if isinstance(event, events.TrajectoryEvent) and event.reward is None:
            reward = verdicts.get(event.task)
            if reward is not None and event.cause not in ("infra", "grading", "cancelled"):
                cause = "submitted" if event.cause == UNGRADED else event.cause
                event = msgspec.structs.replace(event, reward=reward, cause=cause)
        graded.append(event)
    return graded
