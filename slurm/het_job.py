"""A job of HetSlurmExecutor: its state from Slurm, its results, tracebacks and logs by role."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from submitit.core import core

from agentrl.errors import QueryError
from slurm import sbatch, states
from slurm.outcomes import Task, joined, tail
from slurm.role_job import RoleJob
from slurm.states import JobState
from slurm.task import Submission

POLL_S = 0.5
DELAY_S = 30
"""Longest between two questions to Slurm while a job is waited for; they begin at 2 s."""
LAG_S = 5.0
"""How long a result may take to show on another host once its job has ended."""
CANCEL_S = 120.0
log = logging.getLogger(__name__)


class HetInfoWatcher(core.InfoWatcher):
    """Asks Slurm once for all jobs of an executor, accounting or not.

    An outage leaves what was known before. A job that Slurm has forgotten is over.
    """

    def __init__(self, delay_s: int = DELAY_S) -> None:
        super().__init__(delay_s)
        self.jobs: dict[str, JobState | None] = {}
        """None: Slurm has forgotten it."""

    def update(self) -> None:
        """Ask for the jobs that have not ended yet."""
        wanted = sorted(self._registered - self._finished)
        if not wanted:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            found = states.query(wanted)
        except QueryError as error:
            log.warning("jobs %s: their state is not known now: %s", ", ".join(wanted), error)
            return
        for job_id in wanted:
            self.jobs[job_id] = found.get(job_id)
            if self.is_over(job_id):
                self._finished.add(job_id)

    def is_over(self, job_id: str) -> bool:
        """Whether the newest answer said so; nothing is asked."""
        state = self.jobs.get(job_id)
        return job_id in self.jobs and (state is None or state.is_done)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        self.update_if_long_enough(mode)
        state = self.jobs.get(job_id)
        return state.state if state else "UNKNOWN"

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        return {"JobID": job_id, "State": self.get_state(job_id, mode)}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.update_if_long_enough(mode)
        return self.is_over(job_id)

    def clear(self) -> None:
        super().clear()
        self.jobs = {}


class HetSlurmJob(RoleJob):
    """A heterogeneous job, or one with its roles dealt over one allocation."""

    def __init__(
        self,
        folder: Path,
        job_id: str,
        submission: Submission,
        watcher: HetInfoWatcher | None = None,
    ) -> None:
        """folder: this job's own, which holds its submission, script, logs and results."""
        self._watcher = watcher or HetInfoWatcher()
        super().__init__(folder, job_id, submission)

    @classmethod
    def load(cls, folder: Path | str, job_id: str) -> HetSlurmJob:
        """Open a job of an earlier process; folder: the executor's."""
        own = Path(folder).absolute() / job_id
        data = (own / "submission.json").read_bytes()
        return cls(own.resolve(), job_id, msgspec.json.decode(data, type=Submission))

    @property
    def watcher(self) -> HetInfoWatcher:  # type: ignore[override]  # its executor's, not the class's
        return self._watcher

    @property
    def folder(self) -> Path:
        return self._folder

    # -- life ---------------------------------------------------------------------------------

    def cancel(self, check: bool = True) -> None:
        """Cancel all components; with `check`, wait until Slurm says that it has ended."""
        sbatch.cancel(self.job_id)
        if check:
            self._until(lambda: self.watcher.is_done(self.job_id, "force"), CANCEL_S)

    def signal(self, name: str) -> None:
        """Signal the tasks of all roles, as USR2."""
        sbatch.send_signal(self.job_id, name)

    def requeue(self) -> None:
        """Put the whole job back into the queue; its functions are called anew."""
        sbatch.requeue(self.job_id)
        for task in self.tasks:
            self._left.path(task).unlink(missing_ok=True)
        self.watcher.clear()
        self.watcher.register_job(self.job_id)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the job's end. Raises TimeoutError with its state."""
        self._until(self.done, timeout_s)
        if self.watcher.is_over(self.job_id) and self._slurm_state in ("COMPLETED", "FAILED"):
            deadline = time.monotonic() + LAG_S
            while self._missing() and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def done(self, force_check: bool = False) -> bool:
        """Whether every task has left its result, or Slurm says that the job is over."""
        return not self._missing() or self.watcher.is_done(
            self.job_id, "force" if force_check else "standard"
        )

    def _until(self, claim: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not claim():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job_id} is {self.state} after {timeout_s} s")
            time.sleep(POLL_S)

    # -- state --------------------------------------------------------------------------------

    @property
    def components(self) -> JobState | None:
        """What Slurm says now, by component; None for a job that it has forgotten."""
        self.watcher.update_if_long_enough("force")
        return self.watcher.jobs.get(self.job_id)

    @property
    def state(self) -> str:
        """The worst component's state; of a forgotten job what its results say, else UNKNOWN."""
        return self._state("force")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        return {"jobState": self._state(mode)}

    def states(self) -> dict[Task, str]:
        """Return the state of each task: what its result says, else the job's."""
        state = self.state
        return {task: self._left.state(task, state) for task in self.tasks}

    def _state(self, mode: str) -> str:
        state = self.watcher.get_state(self.job_id, mode)
        if state != "UNKNOWN" or not self.watcher.is_over(self.job_id):
            return state
        found = {self._left.state(task, "UNKNOWN") for task in self.tasks}
        return next(word for word in ("FAILED", "UNKNOWN", "COMPLETED") if word in found)

    @property
    def _slurm_state(self) -> str:
        return self.watcher.get_state(self.job_id, "cache")

    # -- what came out ------------------------------------------------------------------------

    def log_path(self, role: str, task: int = 0, stream: str = "out") -> Path:
        return self._folder / "logs" / f"{role}-{task}.{stream}"

    def batch_log(self) -> str:
        """Return what the batch script and its sruns have said."""
        return joined([self._batch_log]) or ""

    @property
    def _batch_log(self) -> Path:
        return self._folder / "batch.log"

    def _missing(self) -> list[Task]:
        names = set(os.listdir(self._folder))
        return [task for task in self.tasks if self._left.path(task).name not in names]

    def _unfinished(self, task: Task) -> str:
        log = self.log_path(*task, "err")
        return (
            f"state {self._slurm_state}; its log {log} ends:\n{tail(log)}\n"
            f"the batch script's, {self._batch_log}, ends:\n{tail(self._batch_log)}"
        )

    def _register_in_watcher(self) -> None:
        self.watcher.register_job(self.job_id)

    def __del__(self) -> None:
        if getattr(self, "_cancel_at_deletion", False) and not self.done(force_check=True):
            self.cancel(check=False)
