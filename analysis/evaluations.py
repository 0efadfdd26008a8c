"""One evaluation's summary as figures want it: shares, intervals, and the share of each task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.errors import RecordError

LABELS = {"base": "start", "sft": "SFT", "rl": "RL"}
SPLITS = ("held_out", "unseen_sites", "unseen_functions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A share (0 to 1) with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluations/OUT/summary.json."""

    name: str
    """OUT, as in `rl-held_out-T0.5`."""
    model: str
    """Its part before the first dash."""
    split: str
    temperature: float
    tasks: int
    attempts: int
    pass_at: dict[int, Estimate]
    """k → share of tasks solved within k attempts."""
    per_task: dict[str, float]
    """Task → share of its graded attempts that solved it."""
    clusters: dict[str, str]
    """Task → what the bootstrap draws together with it."""
    repository: dict[str, str]
    """Task → what it is of; empty where the summary does not say."""
    difficulty: dict[str, str]
    """Task → how hard it is said to be; empty where the summary does not say."""
    causes: dict[str, int]
    seconds: float
    """0 where the summary does not say."""


def model_label(model: str) -> str:
    """Return a model's name for people."""
    return LABELS.get(model, model)


def read_evaluation(path: Path) -> Evaluation:
    """Read a summary. Raises RecordError, which says what is wrong with it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Summary)
    except (msgspec.DecodeError, OSError) as error:
        raise RecordError(f"{path.parent.name}/{path.name}: {error}; evaluate again") from error
    return Evaluation(
        name=path.parent.name,
        model=path.parent.name.partition("-")[0],
        split=found.split,
        temperature=found.temperature,
        tasks=found.tasks,
        attempts=found.attempts,
        pass_at={
            int(k): Estimate(value=e["value"], low=e["low"], high=e["high"])
            for k, e in found.pass_at.items()
        },
        per_task=found.per_task,
        clusters=found.clusters,
        repository=found.repository,
        difficulty=found.difficulty,
        causes=found.causes,
        seconds=found.seconds,
    )


class _Summary(msgspec.Struct, frozen=True):
    """The keys of summary.json that are shown; others are left alone."""

    split: str
    temperature: float
    tasks: int
    attempts: int
    pass_at: dict[str, dict[str, float]] = {}
    per_task: dict[str, float] = {}
    clusters: dict[str, str] = {}
    repository: dict[str, str] = {}
    difficulty: dict[str, str] = {}
    causes: dict[str, int] = {}
    seconds: float = 0.0
