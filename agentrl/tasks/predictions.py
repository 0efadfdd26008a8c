"""Grades given patches, each on its task in a fresh sandbox, and reports as SWE-bench does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, GradingError, TaskError
from agentrl.sandbox.base import SandboxProvider
from agentrl.tasks.answer import apply_patch
from agentrl.tasks.extract import extract
from agentrl.tasks.grade import judge
from agentrl.tasks.load import image_folder
from agentrl.tasks.task import Task
from agentrl.tasks.validate import apply_gold, for_each

GOLD = "gold"
"""In place of a file of predictions: each task's own fix."""
EMPTY = "empty"
"""In place of a file of predictions: no change, and yet graded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """What one prediction came to."""

    instance_id: str
    outcome: str
    """`resolved`, `unresolved`, `empty` (no patch, not run) or `error` (no verdict)."""
    detail: str = ""
    failed: tuple[str, ...] = ()


def read_predictions(path: Path) -> dict[str, str]:
    """Read preds.json (mini-swe-agent, SWE-bench), or rows of it as JSON or JSONL: id → patch.

    Raises ConfigError.
    """
    try:
        text = path.read_text()
        rows = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if (path.suffix == ".jsonl")
            else json.loads(text)
        )
        rows = list(rows.values()) if isinstance(rows, dict) else rows
        return {row["instance_id"]: row["model_patch"] or "" for row in rows}
    except OSError as error:
        raise ConfigError(f"predictions {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"predictions {path}: no rows with instance_id and model_patch: {error!r}"
        ) from error


async def grade_all(
    config: RunConfig,
    tasks: Sequence[Task],
    patches: Mapping[str, str] | str,
    told: Callable[[], None] = lambda: None,
) -> list[Graded]:
    """Grade a prediction for each task that has one, rollout.concurrency at a time.

    patches: id → patch, or GOLD or EMPTY. Raises SandboxUnavailable, SandboxStartError,
    SandboxLost.
    """

    async def one(task: Task, provider: SandboxProvider) -> Graded:
        given = patches if isinstance(patches, str) else patches[task.instance_id]
        if not isinstance(patches, str) and not given.strip():
            return Graded(instance_id=task.instance_id, outcome="empty")
        try:
            return await _grade(config, task, provider, given)
        except (GradingError, TaskError) as error:
            return Graded(instance_id=task.instance_id, outcome="error", detail=str(error))

    wanted = [task for task in tasks if isinstance(patches, str) or task.instance_id in patches]
    return await for_each(config, wanted, one, told)


async def _grade(config: RunConfig, task: Task, provider: SandboxProvider, given: str) -> Graded:
    limit = config.tasks.grade_timeout_s
    image = await asyncio.to_thread(image_folder, config.tasks, task)
    await extract(task, provider, image=image, timeout_s=limit)
    sandbox = await provider.start(image, owner=f"grade {task.instance_id}")
    try:
        if given == GOLD:
            await apply_gold(task, sandbox, timeout_s=limit)
        elif given != EMPTY:
            done = await apply_patch(given.encode(), sandbox, timeout_s=limit)
            if done.exit_code:
                why = f"the patch does not apply: {done.output.strip()[-300:]}"
                return Graded(instance_id=task.instance_id, outcome="unresolved", detail=why)
        verdict = await judge(task, sandbox, image=image, timeout_s=limit)
    finally:
        await sandbox.close()
    return Graded(
        instance_id=task.instance_id,
        outcome="resolved" if verdict.resolved else "unresolved",
        failed=verdict.failed,
    )


def report(tasks: Sequence[Task], graded: Sequence[Graded]) -> dict[str, Any]:
    """Return SWE-bench's report, schema version 2; reasons of errors are an addition."""
    ids = {
        outcome: sorted(one.instance_id for one in graded if one.outcome == outcome)
        for outcome in ("resolved", "unresolved", "empty", "error")
    }
    submitted = sorted(one.instance_id for one in graded)
    completed = sorted(ids["resolved"] + ids["unresolved"])
    return {
        "total_instances": len(tasks),
        "submitted_instances": len(submitted),
        "completed_instances": len(completed),
        "resolved_instances": len(ids["resolved"]),
        "unresolved_instances": len(ids["unresolved"]),
        "empty_patch_instances": len(ids["empty"]),
        "error_instances": len(ids["error"]),
        "completed_ids": completed,
        "incomplete_ids": sorted({task.instance_id for task in tasks} - set(submitted)),
        "empty_patch_ids": ids["empty"],
        "submitted_ids": submitted,
        "resolved_ids": ids["resolved"],
        "unresolved_ids": ids["unresolved"],
        "error_ids": ids["error"],
        "schema_version": 2,
        "details": {one.instance_id: one.detail for one in graded if one.detail},
    }
