"""HetSlurmExecutor: submitit's interface for one Slurm job of several roles.

    executor = HetSlurmExecutor(folder)
    executor.update_parameters(nodes={"inference": 3}, gpus_per_node=8, timeout_min=30)
    job = executor.submit({"trainer": train, "inference": partial(serve, "model")})
    job.results()  # {"trainer": [0], "inference": [0, 0, 0]}

Of submitit it uses the base classes: `core.Executor` (`submit`, `update_parameters`, `folder`),
`core.Job`, `core.InfoWatcher` (when to ask), and its errors. It does not use `SlurmExecutor`,
which renders one homogeneous shape, pickles its functions after sbatch, and reads states from
sacct alone. Functions go by reference and results come as JSON (tuples arrive as lists), so a
requeued job calls the function anew and whatever it resumes from is in its own files.
HetLocalExecutor is the sibling with the same job interface, on one machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from submitit.core import core, utils

from agentrl.errors import LaunchError, SpecError
from slurm import sbatch
from slurm.files import publish, sync_folder
from slurm.het_job import HetInfoWatcher, HetSlurmJob
from slurm.reference import refer
from slurm.render import check_bash, render
from slurm.spec import Component, JobSpec, literal
from slurm.task import RoleSpec, Submission

BY_ROLE = tuple(item.name for item in fields(Component) if item.name != "role")
"""Parameters that take a value for all roles, or a mapping by role."""
OF_JOB = (
    "account",
    "chdir",
    "comment",
    "environment",
    "layout",
    "modules",
    "name",
    "qos",
    "requeue",
    "reservation",
    "signal",
)
OTHER = ("dependency", "grace_s", "timeout_min")
VALID = frozenset((*BY_ROLE, *OF_JOB, *OTHER))


class HetSlurmExecutor(core.Executor):
    """Submits jobs of several roles, each role a component (or a slice of one allocation).

    folder: on a filesystem that all nodes share; each job has its own folder there, which is
    also to be found by its job id. python: the words that start Python on a node, such as
    ("apptainer", "exec", "image.sif", "python3").
    """

    job_class = HetSlurmJob

    def __init__(self, folder: Path | str, *, python: Sequence[str] = (sys.executable,)) -> None:
        super().__init__(folder)
        self.python = tuple(python)
        self.watcher = HetInfoWatcher()

    @classmethod
    def affinity(cls) -> int:
        """Return 2 where Slurm is, else −1 (submitit's scale)."""
        return 2 if shutil.which("sbatch") else -1

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(VALID)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name == "array_parallelism":
                raise LaunchError(f"{name}: {NO_ARRAYS}")
            if name not in VALID:
                import difflib

                near = difflib.get_close_matches(name, VALID, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise LaunchError(
                    f"parameter {name!r}{hint}: must be one of {', '.join(sorted(VALID))}"
                )
        super()._internal_update_parameters(**kwargs)

    def submit(  # type: ignore[override]  # a function a role, where submitit takes one
        self, fn: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any
    ) -> HetSlurmJob:
        """Queue one job that calls each role's function in each of its tasks.

        The roles' order is that of the components: the batch script runs on the first one's first
        node. `args` and `kwargs` are passed to each function; one with a parameter `node` is given
        its task's number, from 0 in each role. Raises LaunchError for what does not go by
        reference, SpecError for a job that cannot be, SubmitError in sbatch's words.
        """
        if self._delayed_batch is not None:
            raise LaunchError(f"batch(): {NO_ARRAYS}")
        submission, spec = self._plan(fn, args, kwargs)
        folder = self.folder / submission.job_id
        (folder / "logs").mkdir(parents=True)  # a missing one would fail the job without a word
        publish(folder / "submission.json", msgspec.json.encode(submission))
        script = folder / "script.sbatch"
        publish(script, self._text(submission, spec).encode())
        check_bash(script)
        dependency = self.parameters.get("dependency", "")
        sbatch.test_only(script, dependency=dependency)
        job_id = sbatch.submit(script, dependency=dependency)
        _link(self.folder, job_id, submission.job_id)
        return HetSlurmJob(folder, job_id, submission, self.watcher)

    def script(self, fn: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any) -> str:
        """Return the batch script that `submit` would queue, without writing or asking anything."""
        return self._text(*self._plan(fn, args, kwargs))

    def spec(self, roles: Sequence[str], *, output: str = "") -> JobSpec:
        """Return the job that the parameters make of `roles`. Raises SpecError."""
        job = {name: self.parameters[name] for name in OF_JOB if name in self.parameters}
        environment = job.pop("environment", {})
        return JobSpec(
            name=job.pop("name", "roles"),
            components=tuple(self._component(role, roles) for role in roles),
            output=output,
            time_min=self.parameters.get("timeout_min", 60),
            modules=tuple(job.pop("modules", ())),
            environment=tuple(sorted(dict(environment).items())),
            **job,
        )

    def _component(self, role: str, roles: Sequence[str]) -> Component:
        values: dict[str, Any] = {}
        for name in BY_ROLE:
            value = self.parameters.get(name)
            if isinstance(value, Mapping):
                if unknown := sorted(set(value) - set(roles)):
                    raise SpecError(
                        f"{name} is given for {unknown[0]!r}: the roles are {', '.join(roles)}"
                    )
                value = value.get(role)
            if value is not None:
                values[name] = tuple(value) if name in ("extra", "srun") else value
        return Component(role=role, **values)

    def _plan(
        self, fn: Mapping[str, Callable[..., Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Submission, JobSpec]:
        if not fn:
            raise LaunchError("no role: give a mapping of a role's name to its function")
        key = f"het-{uuid.uuid4().hex[:12]}"
        spec = self.spec(list(fn), output=literal(str(self.folder / key / "batch.log")))
        submission = Submission(
            job_id=key,
            roles={
                role: RoleSpec(
                    reference=refer(one, *args, **kwargs), nodes=spec.component(role).tasks
                )
                for role, one in fn.items()
            },
            path=[entry for entry in sys.path if os.path.isabs(entry)],
            grace_s=self.parameters.get("grace_s", 30.0),
        )
        return submission, spec

    def _text(self, submission: Submission, spec: JobSpec) -> str:
        return render(
            "executor.sh.j2",
            spec,
            folder=self.folder / submission.job_id,
            key=submission.job_id,
            python=self.python,
        )

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        if len(delayed_submissions) > 1:
            raise LaunchError(f"{len(delayed_submissions)} functions at once: {NO_ARRAYS}")
        return [
            self.submit({"role": functools.partial(one.function, *one.args, **one.kwargs)})
            for one in delayed_submissions
        ]


NO_ARRAYS = "Slurm has no arrays of heterogeneous jobs; call submit once for each, outside batch()"


def _link(folder: Path, job_id: str, key: str) -> None:
    """Let the job's folder be found by its id; the id of another cluster's job gives way."""
    draft = folder / f".{key}.link"
    draft.symlink_to(key)
    draft.rename(folder / job_id)
    sync_folder(folder)
