"""SWE-bench's reports: of a run (`MODEL.RUN_ID.json`), and of one instance (`report.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from agentrl.estimators import cluster_mean
from analysis.evaluations import Estimate, Evaluation
from analysis.sources.adapted import Adapted

GRADED = ("resolved_ids", "unresolved_ids", "empty_patch_ids")
LOST = ("error_ids", "incomplete_ids")


class SwebenchReport:
    """A run's report: schema 2, and older ones with the same lists of ids."""

    name = "SWE-bench report"

    def fits(self, path: Path, head: str) -> bool:
        return path.suffix == ".json" and (
            '"resolved_ids"' in head or '"patch_successfully_applied"' in head
        )

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add an evaluation a run. Errors are not failures: such an instance is not graded."""
        single: dict[str, bool] = {}
        for path in sorted(paths):
            into.lines += 1
            try:
                found = json.loads(path.read_bytes())
            except ValueError as error:
                into.refuse("not JSON", f"{path.name}: {error}")
                continue
            if isinstance(found, dict) and isinstance(found.get("resolved_ids"), list):
                into.known += 1
                into.evaluations.append(_of_run(path, found))
            elif isinstance(found, dict) and all(isinstance(x, dict) for x in found.values()):
                into.known += 1
                single.update({k: bool(v.get("resolved")) for k, v in found.items()})
            else:
                into.refuse("neither a run's report nor an instance's", path.name)
        if single:
            shares = {task: float(solved) for task, solved in single.items()}
            into.evaluations.append(_evaluation("instances", shares, {}))


def _of_run(path: Path, found: Mapping[str, list[str]]) -> Evaluation:
    shares = {task: 0.0 for name in GRADED for task in found.get(name, ())}
    shares |= dict.fromkeys(found["resolved_ids"], 1.0)
    counts = {name.removesuffix("_ids"): len(found.get(name, ())) for name in (*GRADED, *LOST)}
    return _evaluation(path.stem, shares, counts)


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
