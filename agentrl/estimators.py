"""pass@k, its interval, and the difference of two evaluations, on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int

    @property
    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high, "tasks": self.tasks}


def pass_at_k(
    attempts: NDArray[np.int64], solved: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """Return, for each task, the chance that k of its attempts hold a solved one.

    attempts, solved: [tasks], solved ≤ attempts, each task with k attempts or more.
    Unbiased: 1 − C(n−c, k) / C(n, k), as a product so that no factorial overflows.
    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1. Raises ValueError.
    """
    if k < 1 or np.any(attempts < k) or np.any(solved > attempts):
        raise ValueError(f"pass@{k}: needs tasks with {k} attempts or more, and no more solved")
    missed = np.ones(len(attempts))
    for taken in range(k):
        missed *= np.clip(attempts - solved - taken, 0, None) / (attempts - taken)
    return 1.0 - missed


def cluster_mean(
    scores: NDArray[np.float64], clusters: Sequence[str], *, samples: int, seed: int = 0
) -> Estimate:
    """Return the mean of `scores` and its percentile interval, whole clusters drawn together.

    scores: [tasks]; clusters: the cluster of each. Scores that are all equal give an interval of no
    width: the bootstrap knows only what it saw. Raises ValueError without scores.
    """
    if not len(scores):
        raise ValueError("no task has a score; nothing to estimate")
    names, member = np.unique(np.asarray(clusters), return_inverse=True)
    sums, sizes = np.bincount(member, scores), np.bincount(member)
    rng = np.random.default_rng(seed)
    times_drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=samples)
    means = (times_drawn @ sums) / (times_drawn @ sizes)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(value=float(scores.mean()), low=float(low), high=float(high), tasks=len(scores))


def paired_difference(
    before: Mapping[str, object], after: Mapping[str, object], *, samples: int = 2000, seed: int = 0
) -> Estimate:
    """Return pass@1 of `after` minus that of `before` over the tasks that both have graded.

    before, after: two summaries of `evaluate`. Raises ValueError when they share no task.
    """
    first, second = _table(before, "per_task"), _table(after, "per_task")
    clusters = _table(after, "clusters")
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("the two evaluations have no graded task in common; take the same split")
    return cluster_mean(
        np.array([float(second[task]) - float(first[task]) for task in shared]),
        [str(clusters.get(task) or task) for task in shared],
        samples=samples,
        seed=seed,
    )


def _table(summary: Mapping[str, object], key: str) -> Mapping[str, str | float]:
    table = summary.get(key)
    if not isinstance(table, Mapping):
        raise ValueError(f"summary without {key!r}: was it written by `agentrl evaluate`?")
    return table
