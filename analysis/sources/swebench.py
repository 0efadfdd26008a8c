"""SWE-bench's reports: of a run (`MODEL.RUN_ID.json`), and of one instance (`report.json`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import asdict

from agentrl.estimators import cluster_mean
from analysis.evaluations import Estimate, Evaluation
from analysis.sources.adapted import Adapted


class SwebenchReport:
    """A run's report: schema 2, and older ones with the same lists of ids."""

    name = "SWE-bench report"

    def fits(self, path: Path, head: str) -> bool:
        return path.suffix == ".json" and (
            '"resolved_ids"' in head or '"patch_successfully_applied"' in head
        )

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add an evaluation a run. Errors are not failures: such an instance is not graded."""
        single: dict[str, float] = {}
        for path in sorted(paths):
            into.lines += 1
            data = path.read_bytes()
            if b'"resolved_ids"' in data:
                if run := into.decoded(data, _Run, path.name):
                    into.known += 1
                    into.evaluations.append(_of_run(path.stem, run))
            elif (instances := _instances(data, path.name, into)) is not None:
                into.known += 1
                single |= {name: float(each.resolved) for name, each in instances.items()}
        if single:
            into.evaluations.append(_evaluation("instances", single, {}))


class _Run(msgspec.Struct, frozen=True):
    resolved_ids: list[str]
    unresolved_ids: list[str] = []
    empty_patch_ids: list[str] = []
    error_ids: list[str] = []
    incomplete_ids: list[str] = []


class _Instance(msgspec.Struct, frozen=True):
    resolved: bool


def _instances(data: bytes, name: str, into: Adapted) -> dict[str, _Instance] | None:
    return into.decoded(data, dict[str, _Instance], name)


def _of_run(name: str, found: _Run) -> Evaluation:
    """Return a run's evaluation: errors and what did not end are in no denominator."""
    shares = dict.fromkeys((*found.unresolved_ids, *found.empty_patch_ids), 0.0)
    shares |= dict.fromkeys(found.resolved_ids, 1.0)
    counts = {key.removesuffix("_ids"): len(ids) for key, ids in asdict(found).items()}
    return _evaluation(name, shares, counts)


def _evaluation(name: str, shares: Mapping[str, float], causes: dict[str, int]) -> Evaluation:
    tasks = sorted(shares)
    repositories = [task.partition("__")[0] for task in tasks]
    pass_at = {}
    if tasks:
        mean = cluster_mean(np.array([shares[task] for task in tasks]), tasks, samples=2000)
        pass_at[1] = Estimate(value=mean.value, low=mean.low, high=mean.high)
    return Evaluation(
        name=name,
        model=name.partition(".")[0],
        split="swebench",
        temperature=1.0,
        tasks=len(tasks),
        attempts=1,
        pass_at=pass_at,
        per_task=dict(shares),
        clusters=dict(zip(tasks, repositories, strict=True)),
        repository=dict(zip(tasks, repositories, strict=True)),
        difficulty={},
        causes=causes,
        seconds=0.0,
    )
