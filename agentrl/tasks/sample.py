"""A seeded part of a split that keeps its make-up, and proof that no task is in two splits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.tasks.task import Task


def stratified(tasks: Sequence[Task], count: int, *, seed: int) -> list[Task]:
    """Return `count` tasks in their own order, each (repository, difficulty) by its share.

    count 0, or no less than there are, returns all. Shares are rounded by largest remainder; a seed
    always takes the same tasks, whatever order the rows come in.
    """
    if not 0 < count < len(tasks):
        return list(tasks)
    strata: dict[tuple[str, str], list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.instance_id):
        strata.setdefault((task.repo, task.difficulty), []).append(task)
    exact = {key: count * len(some) / len(tasks) for key, some in strata.items()}
    sizes = {key: int(share) for key, share in exact.items()}
    rest = sorted(strata, key=lambda key: (sizes[key] - exact[key], key))
    for key in rest[: count - sum(sizes.values())]:
        sizes[key] += 1
    rng = random.Random(f"stratified {seed}")
    taken = {
        task.instance_id for key in sorted(strata) for task in rng.sample(strata[key], sizes[key])
    }
    return [task for task in tasks if task.instance_id in taken]


def leaked(trained: Sequence[Task], evaluated: Sequence[Task]) -> tuple[list[str], list[str]]:
    """Return the instances that are in both splits, and the repositories that both draw on.

    The same issue under another id counts as the same instance.
    """
    ids = {task.instance_id for task in trained}
    issues = {(task.repo, task.problem_statement.strip()) for task in trained}
    repositories = {task.repo for task in trained if task.repo}
    instances = [
        task.instance_id
        for task in evaluated
        if task.instance_id in ids or (task.repo, task.problem_statement.strip()) in issues
    ]
    return instances, sorted(repositories & {task.repo for task in evaluated})
