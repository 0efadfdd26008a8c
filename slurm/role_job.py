"""submitit's job with its tasks known by role: what the jobs of both executors are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from slurm.outcomes import Outcomes, Task, joined
from slurm.task import Submission


class RoleJob(core.Job[Any], ABC):
    """Results, errors and logs by role, out of the files that its tasks have left.

    Who starts the tasks says where a log is, what is known of a task without a result, and waits.
    """

    def __init__(self, folder: Path, job_id: str, submission: Submission) -> None:
        self._folder = Path(folder)
        self._left = Outcomes(folder=self._folder, submission=submission)
        super().__init__(folder, job_id)

    @property
    def roles(self) -> dict[str, int]:
        """Tasks by role."""
        return self._left.roles

    @property
    def tasks(self) -> list[Task]:
        return self._left.tasks

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)

    def results(self) -> dict[str, list[Any]]:  # type: ignore[override]  # by role
        """Wait, and return each role's results, a list in the order of its tasks.

        Raises the first role's FailedJobError (its traceback) or UncompletedJobError (no result).
        """
        return self._left.results(self.exceptions())

    def result(self) -> dict[str, list[Any]]:
        return self.results()

    def exceptions(self) -> dict[Task, utils.UncompletedJobError]:
        """Wait, and return the errors by role and task; empty when all went well."""
        self.wait()
        return self._left.errors(self.job_id, self._unfinished)

    def exception(self) -> utils.UncompletedJobError | None:
        """Wait, and return the first error in the order of the roles, or None."""
        return next(iter(self.exceptions().values()), None)

    def stdout(self, role: str | None = None, task: int = 0) -> str | None:
        """Return one task's output, or with no role that of all; None before there is any."""
        return self._log("out", role, task)

    def stderr(self, role: str | None = None, task: int = 0) -> str | None:
        """Return one task's error output, or with no role that of all."""
        return self._log("err", role, task)

    @abstractmethod
    def log_path(self, role: str, task: int = 0, stream: str = "out") -> Path:
        """Return where one task's output or error output (`err`) goes."""

    @abstractmethod
    def _unfinished(self, task: Task) -> str:
        """Tell what is known of a task without a result."""

    def _log(self, stream: str, role: str | None, task: int) -> str | None:
        tasks = self.tasks if role is None else [(role, task)]
        return joined(self.log_path(*one, stream) for one in tasks)
