"""HetLocalExecutor: submitit's interface for several roles at once, as processes on this machine.

    executor = HetLocalExecutor(folder)
    executor.update_parameters(nodes={"inference": 2})
    job = executor.submit({"trainer": train, "inference": partial(serve, "model")})
    job.results()  # {"trainer": [0], "inference": [0, 0]}

Of submitit it uses the base classes: `core.Executor` (`submit`, `update_parameters`, `folder`),
`core.Job` (`paths`, `awaitable`, `cancel_at_deletion`, `repr`) and its errors
(`FailedJobError`, `UncompletedJobError`). It does not use `LocalExecutor`, whose controller runs
copies of one function, ends all when one ends, and knows no roles; nor submitit's pickles:
functions go by reference and results come as JSON (tuples arrive as lists).
HetSlurmExecutor is the sibling with the same job interface.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from submitit.core import core, utils

from agentrl.errors import LaunchError
from slurm.files import publish
from slurm.outcomes import Task, tail
from slurm.reference import refer
from slurm.role_job import RoleJob
from slurm.states import worst
from slurm.task import KILL_NOW, MARK, RoleSpec, Submission, kill_marked

KILL_WAIT_S = 10.0


class HetLocalJob(RoleJob):
    """A job whose tasks are processes of this one, a task being a node's role."""

    def __init__(self, folder: Path, submission: Submission, logs: Path | None = None) -> None:
        self._logs = logs
        self._processes: dict[Task, subprocess.Popen[bytes]] = {}
        self._marks: dict[Task, str] = {}
        self._cancelled: set[Task] = set()
        super().__init__(folder, submission.job_id, submission)

    @classmethod
    def load(cls, folder: Path, job_id: str, logs: Path | None = None) -> HetLocalJob:
        """Open a job of an earlier process, to read its results."""
        data = (Path(folder) / f"{job_id}_submission.json").read_bytes()
        return cls(folder, msgspec.json.decode(data, type=Submission), logs)

    # -- life ---------------------------------------------------------------------------------

    def start(self, role: str, node: int = 0) -> None:
        """Start one task, or start it again after its end, appending to its logs."""
        task = (role, node)
        if task in self._processes and self._processes[task].poll() is None:
            raise LaunchError(f"{role} on node {node} still runs; wait for its end first")
        self._left.path(task).unlink(missing_ok=True)
        out, err = self.log_path(role, node, "out"), self.log_path(role, node, "err")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._marks[task] = uuid.uuid4().hex
        with out.open("ab") as stdout, err.open("ab") as stderr:
            self._processes[task] = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "slurm.task",
                    str(self._submission_path),
                    role,
                    str(node),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(self._marks[task]),
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
            )

    def returncode(self, role: str, node: int = 0) -> int | None:
        """Return one task's code, 128+N after signal N; None while it runs."""
        return self._processes[role, node].poll()

    def ended(self) -> dict[Task, int]:
        """Return the codes of the tasks that have ended."""
        codes = {task: process.poll() for task, process in self._processes.items()}
        return {task: code for task, code in codes.items() if code is not None}

    def signal(self, role: str, number: int = signal.SIGTERM) -> None:
        """Send a signal to the role on each of its nodes."""
        for (name, _), process in self._processes.items():
            if name == role and process.poll() is None:
                process.send_signal(number)

    def cancel(self, check: bool = True) -> None:
        """Kill all roles with all that they started; with `check`, wait until they are gone."""
        running = [task for task, process in self._processes.items() if process.poll() is None]
        self._cancelled.update(running)
        for task in running:
            self._processes[task].send_signal(KILL_NOW)
        if check:
            for task in running:
                self._reap(task)

    def kill(self, role: str) -> None:
        """Kill one role with all that it started, and wait until it is gone."""
        self.signal(role, KILL_NOW)
        for task in self._processes:
            if task[0] == role:
                self._reap(task)

    def _reap(self, task: Task) -> None:
        process = self._processes[task]
        try:
            process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILL_WAIT_S)
        kill_marked(self._marks[task])

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for every task's end. Raises TimeoutError naming those that still run."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for (role, node), process in self._processes.items():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"{role} on node {node} still runs after {timeout_s} s"
                ) from None

    def done(self, force_check: bool = False) -> bool:
        """Whether every task has ended."""
        del force_check
        return all(state not in ("RUNNING", "PENDING") for state in self.states().values())

    # -- state --------------------------------------------------------------------------------

    def states(self) -> dict[Task, str]:
        """Return Slurm's word for the state of each task."""
        return {task: self._state(task) for task in self.tasks}

    @property
    def state(self) -> str:
        """RUNNING while a role runs, then the worst role's state."""
        return worst(self.states().values())

    def get_info(self, mode: str = "force") -> dict[str, str]:
        del mode
        return {"jobState": self.state}

    def _state(self, task: Task) -> str:
        process = self._processes.get(task)
        if process is None:
            return self._left.state(task, "UNKNOWN")
        code = process.poll()
        if code is None:
            return "RUNNING"
        if task in self._cancelled:
            return "CANCELLED"
        return "FAILED" if code else "COMPLETED"

    # -- what came out ------------------------------------------------------------------------

    def answer(self, role: str, node: int = 0) -> dict[str, Any]:
        """Return one task's result without waiting, if it is a dict; else an empty one."""
        outcome, value = self._left.of((role, node))
        return value if outcome == "success" and isinstance(value, dict) else {}

    def log_path(self, role: str, task: int = 0, stream: str = "out") -> Path:
        if self._logs is not None:
            return self._logs / f"{role}-{task}.{stream}"
        return self._folder / f"{self.job_id}_{role}-{task}_log.{stream}"

    def _unfinished(self, task: Task) -> str:
        code = self._processes[task].poll() if task in self._processes else None
        log = self.log_path(*task, "err")
        return f"state {self._state(task)}, exit code {code}; its log {log} ends:\n{tail(log)}"

    @property
    def _submission_path(self) -> Path:
        return self._folder / f"{self.job_id}_submission.json"

    def _register_in_watcher(self) -> None:
        """The processes are asked themselves; submitit's shared watcher is for clusters."""

    def __del__(self) -> None:
        if getattr(self, "_cancel_at_deletion", False) and not self.done():
            self.cancel(check=False)


class HetLocalExecutor(core.Executor):
    """Runs one job of several roles, each a process of its own session on this machine.

    folder: where submissions and results are written. logs: where logs go as ROLE-NODE.{out,err};
    without it they are beside the results. Parameters: nodes (by role), grace_s.
    Submit from the main thread: roles end with the thread that started them.
    """

    job_class = HetLocalJob

    def __init__(self, folder: Path | str, *, logs: Path | None = None) -> None:
        super().__init__(folder)
        self.logs = logs

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"nodes", "grace_s"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - self._valid_parameters())
        if unknown:
            raise LaunchError(
                f"parameter {unknown[0]!r}: must be one of {self._valid_parameters()}"
            )
        super()._internal_update_parameters(**kwargs)

    def submit(  # type: ignore[override]  # a function a role, where submitit takes one
        self, fn: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any
    ) -> HetLocalJob:
        """Start every role; `args` and `kwargs` are passed to each function.

        A function with a parameter `node` is given its node's number, from 0 in each role.
        Raises LaunchError for a function or argument that does not go by reference.
        """
        if self._delayed_batch is not None:
            raise LaunchError(
                "arrays of heterogeneous jobs are not possible; submit outside batch()"
            )
        nodes: dict[str, int] = self.parameters.get("nodes", {})
        if not fn or set(nodes) - set(fn) or any(count < 1 for count in nodes.values()):
            raise LaunchError(
                f"roles {sorted(fn)} with nodes={nodes}: each must be a role, 1 or more"
            )
        submission = Submission(
            job_id=f"local-{uuid.uuid4().hex[:8]}",
            roles={
                role: RoleSpec(reference=refer(one, *args, **kwargs), nodes=nodes.get(role, 1))
                for role, one in fn.items()
            },
            path=[entry for entry in sys.path if os.path.isabs(entry)],
            grace_s=self.parameters.get("grace_s", 30.0),
        )
        return self._start(submission)

    def _start(self, submission: Submission) -> HetLocalJob:
        path = self.folder / f"{submission.job_id}_submission.json"
        publish(path, msgspec.json.encode(submission))
        job = HetLocalJob(self.folder, submission, self.logs)
        try:
            for task in job.tasks:
                job.start(*task)
        except BaseException:
            job.cancel()
            raise
        return job

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [
            self.submit({"role": functools.partial(one.function, *one.args, **one.kwargs)})
            for one in delayed_submissions
        ]


def _environment(mark: str) -> dict[str, str]:
    """Return the role's environment: ours, the mark, and no import from where it happens to run."""
    return os.environ | {
        MARK: mark,
        "AGENTRL_LAUNCHER": str(os.getpid()),
        "PYTHONSAFEPATH": "1",
    }
