"""What the tasks of a job have left, by role: results, errors and logs of either executor's job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core import utils

from slurm.files import listed
from slurm.task import Submission, result_path

Task = tuple[str, int]
"""A role and a task of it, from 0 in each role."""
TAIL_BYTES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """The result files of one job."""

    folder: Path
    submission: Submission

    @property
    def roles(self) -> dict[str, int]:
        """Tasks by role."""
        return {role: spec.nodes for role, spec in self.submission.roles.items()}

    @property
    def tasks(self) -> list[Task]:
        return [(role, task) for role, tasks in self.roles.items() for task in range(tasks)]

    def path(self, task: Task) -> Path:
        return result_path(self.folder, self.submission.job_id, *task)

    def of(self, task: Task) -> tuple[str, Any]:
        """Return (`success`, value), (`error`, traceback) or (`none`, None) before there is any."""
        path = self.path(task)
        if not listed(path):
            return "none", None
        outcome, value = json.loads(path.read_bytes())
        return outcome, value

    def state(self, task: Task, otherwise: str) -> str:
        """Return Slurm's word for what the task has left, `otherwise` if nothing."""
        return {"success": "COMPLETED", "error": "FAILED"}.get(self.of(task)[0], otherwise)

    def results(self, errors: dict[Task, utils.UncompletedJobError]) -> dict[str, list[Any]]:
        """Return each role's results, in the order of its tasks; raises the first of `errors`."""
        for error in errors.values():
            raise error
        return {
            role: [self.of((role, task))[1] for task in range(tasks)]
            for role, tasks in self.roles.items()
        }

    def errors(
        self, job_id: str, unfinished: Callable[[Task], str]
    ) -> dict[Task, utils.UncompletedJobError]:
        """Return FailedJobError (a traceback) or UncompletedJobError (no result) by task.

        unfinished: tells what is known of a task without a result.
        """
        found: dict[Task, utils.UncompletedJobError] = {}
        for task in self.tasks:
            outcome, value = self.of(task)
            where = f"job {job_id}, {task[0]} task {task[1]}"
            if outcome == "error":
                found[task] = utils.FailedJobError(f"{where} failed:\n{value}")
            elif outcome == "none":
                said = f"{where} left no result: {unfinished(task)}"
                found[task] = utils.UncompletedJobError(said)
        return found


def joined(paths: Iterable[Path]) -> str | None:
    """Return the texts of the logs that are there, None without any."""
    texts = [path.read_text(errors="replace") for path in paths if listed(path)]
    return "\n".join(texts) if texts else None


def tail(path: Path) -> str:
    """Return the end of a log, empty where there is none."""
    return (joined([path]) or "")[-TAIL_BYTES:]
