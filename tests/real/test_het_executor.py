"""HetSlurmExecutor on a real small cluster: results, tracebacks, states and ends by role."""

from __future__ import annotations

import functools
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import het_functions as roles
import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError

from agentrl.errors import LaunchError, QueryError, SubmitError
from slurm import states
from slurm.files import publish
from slurm.het import HetSlurmExecutor, HetSlurmJob
from slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
LAYOUTS = ["het", "homogeneous"]
Functions = dict[str, Callable[..., Any]]


def until(claim: Callable[[], object], what: str, limit_s: float = 150.0) -> None:
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.2)


@pytest.fixture
def executor(lab: Lab, odd_path: Path, monkeypatch: pytest.MonkeyPatch) -> HetSlurmExecutor:
    """One that submits 1+3 nodes to the cluster, its folder named with a space and a quote."""
    return on(lab, odd_path, monkeypatch)


def on(lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch) -> HetSlurmExecutor:
    monkeypatch.setenv("PATH", lab.environment()["PATH"])
    made = HetSlurmExecutor(folder / "jobs")
    made.update_parameters(
        name="it's a job",
        nodes={"inference": 3},
        partition={"trainer": "trainer", "inference": "inference"},
        cpus_per_task={"trainer": 2, "inference": 3},
        gpus_per_node={"trainer": 8, "inference": 4},
        timeout_min=5,
        grace_s=2.0,
    )
    return made


def laid_out(executor: HetSlurmExecutor, layout: str) -> HetSlurmExecutor:
    executor.update_parameters(layout=layout)
    if layout == "homogeneous":
        executor.update_parameters(partition="all")
    return executor


def queue(lab: Lab) -> list[str]:
    return lab.run(["squeue", "--noheader", "--format=%i %T"]).stdout.split("\n")[:-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_and_three_nodes_give_results_by_role(executor: HetSlurmExecutor, layout: str) -> None:
    job = laid_out(executor, layout).submit({"trainer": roles.where, "inference": roles.where})
    results = job.results()
    hosts = [one["host"] for role in ("trainer", "inference") for one in results[role]]
    assert sorted(hosts) == ["inf0", "inf1", "inf2", "trn0"]
    assert [one["node"] for one in results["inference"]] == [0, 1, 2]
    assert [one["SLURM_NTASKS"] for one in (*results["trainer"], *results["inference"])] == list(
        "1333"
    )
    assert results["inference"][0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert {one["SLURM_JOB_ID"] for one in results["inference"]} == {job.job_id}
    until(lambda: job.state == "COMPLETED", "the job's end")
    assert (job.stdout("inference", 2) or "").startswith("hello from ")


def test_the_first_component_is_where_the_first_role_runs(executor: HetSlurmExecutor) -> None:
    job = executor.submit({"trainer": roles.where, "inference": roles.where})
    assert job.results()["trainer"][0]["host"] == "trn0"
    until(lambda: job.watcher.is_done(job.job_id, "force"), "the job's end")
    parts = job.components
    assert parts is not None
    assert [(one.index, one.nodes) for one in parts.components] == [(0, "trn0"), (1, "inf[0-2]")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failing_role_is_told_with_its_traceback(executor: HetSlurmExecutor, layout: str) -> None:
    job = laid_out(executor, layout).submit(
        {"trainer": functools.partial(roles.fail, "no luck"), "inference": roles.where}
    )
    errors = job.exceptions()
    assert list(errors) == [("trainer", 0)]
    assert isinstance(errors["trainer", 0], FailedJobError)
    assert "trainer task 0 failed:\nTraceback" in str(errors["trainer", 0])
    assert "raise ValueError(message)\nValueError: no luck" in str(errors["trainer", 0])
    assert job.states()["inference", 2] == "COMPLETED"
    until(lambda: job.state == "FAILED", "the job's state")
    with pytest.raises(FailedJobError, match="no luck"):
        job.results()


def test_a_killed_role_left_no_result_and_the_others_did(executor: HetSlurmExecutor) -> None:
    job = executor.submit({"trainer": roles.where, "inference": roles.be_killed})
    errors = job.exceptions()
    assert sorted(errors) == [("inference", 0), ("inference", 1), ("inference", 2)]
    assert type(errors["inference", 0]) is UncompletedJobError
    assert "left no result: state FAILED" in str(errors["inference", 0])
    assert job.states()["trainer", 0] == "COMPLETED"


def test_many_tasks_of_a_node_have_each_its_number(executor: HetSlurmExecutor) -> None:
    executor.update_parameters(tasks_per_node={"inference": 2}, cpus_per_task=1)
    results = executor.submit({"trainer": roles.where, "inference": roles.where}).results()
    assert [one["node"] for one in results["inference"]] == list(range(6))
    assert len({one["host"] for one in results["inference"]}) == 3


def test_cancel_ends_all_roles(executor: HetSlurmExecutor, tmp_path: Path) -> None:
    job = executor.submit(
        {
            "trainer": functools.partial(roles.say_and_wait, str(tmp_path), "trainer"),
            "inference": functools.partial(roles.say_and_wait, str(tmp_path), "inference"),
        }
    )
    until(lambda: {"trainer", "inference"} <= {p.name for p in tmp_path.iterdir()}, "both run")
    assert job.state == "RUNNING"
    job.cancel()
    assert (job.state, job.done()) == ("CANCELLED", True)
    marks = subprocess.run(
        ["grep", "-l", job.folder.name, "-r", "/proc", "--include=environ"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert marks.stdout == ""


def test_a_job_waits_for_the_one_that_it_depends_on(
    executor: HetSlurmExecutor, lab: Lab, tmp_path: Path
) -> None:
    executor.update_parameters(partition="all", nodes={}, cpus_per_task=1, gpus_per_node=0)
    first = executor.submit({"trainer": roles.until_there}, str(tmp_path / "go"))
    executor.update_parameters(dependency=f"afterok:{first.job_id}")
    second = executor.submit({"trainer": roles.where, "inference": roles.where})
    until(lambda: first.state == "RUNNING", "the first to run")
    until(lambda: reasons(second) == {("PENDING", "Dependency")}, "Slurm's word on the second")
    publish(tmp_path / "go", b"on")
    assert first.results() == {"trainer": ["on"]}
    assert [one["host"] != "" for one in second.results()["trainer"]] == [True]


def reasons(job: HetSlurmJob) -> set[tuple[str, str]]:
    parts = job.components
    return {(one.state, one.reason) for one in parts.components} if parts else set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": {"trainer": "trainer", "inference": "nowhere"}}, "invalid partition"),
        ({"nodes": {"inference": 4}}, "[Nn]ode"),
        ({"dependency": "afterok:x"}, "dependency"),
    ],
)
def test_a_second_component_that_cannot_be_is_refused_before_anything_is_queued(
    executor: HetSlurmExecutor, lab: Lab, change: dict[str, Any], said: str
) -> None:
    executor.update_parameters(**change)
    with pytest.raises(SubmitError, match=rf"sbatch --test-only .*exited 1: .*{said}"):
        executor.submit({"trainer": roles.where, "inference": roles.where})
    assert queue(lab) == []


def test_arrays_are_refused_with_what_to_do(executor: HetSlurmExecutor, lab: Lab) -> None:
    with pytest.raises(LaunchError, match="no arrays of heterogeneous jobs"), executor.batch():
        executor.submit({"trainer": roles.where})
    with pytest.raises(LaunchError, match="2 functions at once: Slurm has no arrays"):
        executor.map_array(roles.fail, ["a", "b"])
    assert queue(lab) == []


def test_a_job_may_submit_another(executor: HetSlurmExecutor, tmp_path: Path) -> None:
    executor.update_parameters(nodes={}, partition="all", cpus_per_task=2, gpus_per_node=1)
    (told,) = executor.submit({"trainer": roles.submit_another}, str(tmp_path)).results()["trainer"]
    trainer, inference = told["results"]["trainer"], told["results"]["inference"]
    assert told["own"] != trainer[0]["SLURM_JOB_ID"]
    assert [one["SLURM_NTASKS"] for one in (*trainer, *inference)] == ["1", "2", "2"]
    assert [one["SLURM_CPUS_PER_TASK"] for one in (*trainer, *inference)] == ["1", "3", "3"]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in (*trainer, *inference)} == {""}


def test_a_signal_reaches_the_functions_of_every_role(
    executor: HetSlurmExecutor, tmp_path: Path
) -> None:
    folders = [tmp_path / "trainer", tmp_path / "inference"]
    for folder in folders:
        folder.mkdir()
    executor.update_parameters(nodes={})
    waiting = {one.name: functools.partial(roles.until_signal, str(one)) for one in folders}
    job = executor.submit(waiting)
    until(lambda: all((folder / "ready").is_file() for folder in folders), "both wait")
    job.signal("USR2")
    assert job.results() == {"trainer": ["SIGUSR2"], "inference": ["SIGUSR2"]}


def test_a_requeued_job_calls_its_functions_anew_and_keeps_its_logs(
    executor: HetSlurmExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(requeue=True, nodes={"inference": 1})
    lives = functools.partial(roles.count_lives, str(tmp_path))
    job = executor.submit({"trainer": lives, "inference": roles.where})
    until((tmp_path / "ready").is_file, "the first life")
    job.requeue()
    assert not job.done(force_check=True)
    assert job.results()["trainer"] == [2]
    assert (tmp_path / "lives").read_text() == "0\n1\n"
    assert [f"life {one}" in job.batch_log() for one in (0, 1)] == [True, True]


def test_a_job_of_an_earlier_process_is_opened_by_its_id(executor: HetSlurmExecutor) -> None:
    job = executor.submit({"trainer": roles.where, "inference": roles.where})
    again = HetSlurmJob.load(executor.folder, job.job_id)
    assert again.results() == job.results()


def test_one_question_answers_for_all_jobs_of_an_executor(executor: HetSlurmExecutor) -> None:
    executor.update_parameters(nodes={}, cpus_per_task=1, gpus_per_node=0)
    jobs = [executor.submit({"trainer": roles.where, "inference": roles.where}) for _ in range(3)]
    executor.watcher.update()
    assert executor.watcher.num_calls == 1
    assert set(executor.watcher.jobs) == {job.job_id for job in jobs}
    for job in jobs:
        job.results()


# What remains when the controller has forgotten the job


def forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let squeue answer as it does MinJobAge after a job's end."""
    program = folder / "forgetful" / "squeue"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


@pytest.mark.parametrize(
    ("trainer", "state"),
    [(roles.where, "COMPLETED"), (roles.be_killed, "UNKNOWN"), (roles.until_there, "FAILED")],
)
def test_without_accounting_the_results_of_a_forgotten_job_decide(
    executor: HetSlurmExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Callable[..., Any],
    state: str,
) -> None:
    if trainer is roles.until_there:
        trainer = functools.partial(roles.until_there, str(tmp_path / "never"), 0.1)
    job = executor.submit({"trainer": trainer, "inference": roles.where})
    until(lambda: states.query([job.job_id])[job.job_id].is_done, "the job's end")
    forget(tmp_path, monkeypatch)
    assert (job.state, job.done()) == (state, True)
    assert bool(job.exceptions()) == (state != "COMPLETED")


def test_with_accounting_a_forgotten_job_has_its_state_by_component(
    lab_accounting: Lab, odd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = on(lab_accounting, odd_path, monkeypatch)
    job = executor.submit({"trainer": roles.where, "inference": roles.be_killed})
    until(lambda: states.query([job.job_id])[job.job_id].is_done, "the job's end")
    forget(odd_path, monkeypatch)
    # slurmdbd learns of an end a little later, and of each component by itself
    until(
        lambda: [one.state for one in of_job(job.job_id)] == ["FAILED", "FAILED"], "sacct's answer"
    )
    assert job.state == "FAILED"
    parts = job.components
    assert parts is not None
    assert [(one.index, one.nodes) for one in parts.components] == [(0, "trn0"), (1, "inf[0-2]")]
    assert len(job.exceptions()) == 3


def of_job(job_id: str) -> tuple[states.ComponentState, ...]:
    try:
        found = states.query([job_id]).get(job_id)
    except QueryError:  # a database that is busy
        return ()
    return found.components if found else ()


# The examples


@pytest.mark.parametrize("name", ["het_job.sbatch", "one_allocation.sbatch"])
def test_an_example_runs_as_it_stands(
    lab: Lab, odd_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", lab.environment()["PATH"])
    source = Path(__file__).parents[2] / "slurm" / "examples" / name
    (odd_path / name).write_text(source.read_text())
    (odd_path / "logs").mkdir()
    (odd_path / "train.py").write_text(TRAIN)
    (odd_path / "serve.py").write_text(SERVE)
    subprocess.run(["sbatch", name], cwd=odd_path, check=True, capture_output=True)
    until((odd_path / "saved").is_file, "the trainer's first life")
    until((odd_path / "trained").is_file, "the trainer's second life")
    until(lambda: queue(lab) == [], "the job's end")
    told = Counter((odd_path / "served").read_text().split())
    assert list(told.values()) == [2, 2]  # both nodes, in both lives
    assert len(list((odd_path / "logs").glob("*-inference-*.log"))) >= 2


TRAIN = """
import os, sys, time
second = os.path.exists("saved")
def served(): return len(open("served").read().split()) if os.path.exists("served") else 0
while served() < (4 if second else 2): time.sleep(0.05)
if second: open("trained", "w").close(); sys.exit(0)
open("saved", "w").close(); sys.exit(75)
"""
SERVE = """
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
assert os.environ["TRAINER_HOST"]
with open("served", "a") as file: file.write(socket.gethostname() + "\\n")
time.sleep(600)
"""
