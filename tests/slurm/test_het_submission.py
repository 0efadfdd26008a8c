"""HetSlurmExecutor before Slurm, and when Slurm does not answer: with programs of our own."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import role_functions as roles

from agentrl.errors import ConfigError, LaunchError, SpecError, SubmitError
from slurm.files import publish
from slurm.het import HetSlurmExecutor
from slurm.het_job import HetSlurmJob
from slurm.task import result_path

Fake = Callable[..., Path]
PAIR: dict[str, Callable[..., Any]] = {
    "trainer": functools.partial(roles.add, 1, b=2),
    "inference": functools.partial(roles.name_node, "n"),
}


@pytest.fixture
def executor(odd_path: Path) -> HetSlurmExecutor:
    return HetSlurmExecutor(odd_path / "jobs")


@pytest.fixture
def job(executor: HetSlurmExecutor, fake_program: Fake) -> HetSlurmJob:
    fake_program("sbatch", "echo 6")
    return executor.submit(PAIR)


def say(fake_program: Fake, *lines: str) -> Path:
    """Let squeue answer `lines`."""
    return fake_program("squeue", "\n".join(f"echo '{line}'" for line in lines) or "true")


def leave(job: HetSlurmJob, role: str, text: str) -> None:
    key = job.folder.name
    publish(result_path(job.folder, key, role, 0), text.encode())


def test_importing_it_takes_neither_torch_nor_jinja2() -> None:
    code = "import sys, slurm.het; print(sorted({'torch', 'jinja2', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_is_checked_before_it_is_queued(job: HetSlurmJob, tmp_path: Path) -> None:
    calls = (tmp_path / "programs" / "sbatch.calls").read_text().splitlines()
    script = str(job.folder / "script.sbatch")
    assert calls == ["sbatch", "--test-only", script, "sbatch", "--parsable", script]


def test_what_the_check_refuses_is_not_queued(
    executor: HetSlurmExecutor, fake_program: Fake
) -> None:
    calls = fake_program("sbatch", "echo 'invalid partition specified: x' >&2; exit 1")
    with pytest.raises(SubmitError, match="invalid partition specified: x"):
        executor.submit(PAIR)
    assert "--parsable" not in calls.read_text()


def test_the_folder_of_its_output_is_there_before_sbatch(
    executor: HetSlurmExecutor, fake_program: Fake
) -> None:
    fake_program("sbatch", 'for last; do :; done; ls -d "$(dirname "$last")/logs" >&2 && echo 6')
    assert executor.submit(PAIR).job_id == "6"


def test_a_jobs_folder_is_found_by_its_id(job: HetSlurmJob, executor: HetSlurmExecutor) -> None:
    assert os.readlink(executor.folder / "6") == job.folder.name
    assert HetSlurmJob.load(executor.folder, "6").roles == {"trainer": 1, "inference": 1}


def test_the_id_of_another_clusters_job_gives_way(
    job: HetSlurmJob, executor: HetSlurmExecutor
) -> None:
    again = executor.submit(PAIR)
    assert again.job_id == job.job_id
    assert HetSlurmJob.load(executor.folder, "6").folder == again.folder.resolve()


def test_a_dry_run_writes_and_asks_nothing(executor: HetSlurmExecutor, fake_program: Fake) -> None:
    calls = fake_program("sbatch", "exit 1")
    text = executor.script(PAIR)
    assert text.count("#SBATCH hetjob") == 1
    assert not calls.exists()
    assert not executor.folder.exists()


def test_a_percent_sign_in_the_folder_is_no_pattern(tmp_path: Path) -> None:
    text = HetSlurmExecutor(tmp_path / "100% %j").script(PAIR)
    assert "/100%% %%j/het-" in next(line for line in text.splitlines() if "--output" in line)
    assert "/100% %j/het-" in next(line for line in text.splitlines() if "folder=" in line)


def test_a_requeued_job_has_no_results_of_its_earlier_life(
    job: HetSlurmJob, fake_program: Fake
) -> None:
    say(fake_program, "6+0|6|PENDING||p|1|BeginTime", "6+1|7|PENDING||p|1|BeginTime")
    calls = fake_program("scontrol", "true")
    leave(job, "trainer", '["success", 3]')
    leave(job, "inference", '["success", "n0"]')
    job.requeue()
    assert calls.read_text().splitlines() == ["scontrol", "requeue", "6"]
    assert not job.done(force_check=True)


def test_parameters_are_for_all_roles_or_by_role(executor: HetSlurmExecutor) -> None:
    executor.update_parameters(cpus_per_task=4, nodes={"inference": 3}, layout="homogeneous")
    executor.update_parameters(environment={"B": "2", "A": "1"}, extra=["--exclusive"])
    spec = executor.spec(["trainer", "inference"])
    assert [one.cpus_per_task for one in spec.components] == [4, 4]
    assert [one.nodes for one in spec.components] == [1, 3]
    assert spec.environment == (("A", "1"), ("B", "2"))


def test_a_parameter_that_is_none_names_the_nearest(executor: HetSlurmExecutor) -> None:
    with pytest.raises(LaunchError, match=r"'time_out_min' \(did you mean timeout_min\?\)"):
        executor.update_parameters(time_out_min=3)


def test_a_role_that_is_not_submitted_is_refused(executor: HetSlurmExecutor) -> None:
    executor.update_parameters(nodes={"engine": 3})
    with pytest.raises(SpecError, match="nodes is given for 'engine': the roles are trainer"):
        executor.submit(PAIR)


@pytest.mark.parametrize("bad", [{"nodes": 0}, {"signal": "USR1@9"}, {"extra": ["--array=1-2"]}])
def test_a_job_that_cannot_be_is_refused(executor: HetSlurmExecutor, bad: dict[str, Any]) -> None:
    executor.update_parameters(**bad)
    with pytest.raises(ConfigError):
        executor.script(PAIR)


def test_no_role_is_refused(executor: HetSlurmExecutor) -> None:
    with pytest.raises(LaunchError, match="no role"):
        executor.submit({})


def test_a_lambda_is_refused_before_anything_is_written(executor: HetSlurmExecutor) -> None:
    with pytest.raises(LaunchError, match="not importable by name"):
        executor.submit({"trainer": lambda: 1})
    assert not executor.folder.exists()


def test_an_array_is_refused_in_batch_and_in_map(executor: HetSlurmExecutor) -> None:
    with pytest.raises(LaunchError, match="no arrays"), executor.batch():
        executor.submit(PAIR)
    with pytest.raises(LaunchError, match="no arrays"):
        executor.submit_array([roles.kill_itself, roles.kill_itself])
    with pytest.raises(LaunchError, match="no arrays"):
        executor.update_parameters(array_parallelism=2)


# States


def test_the_worst_component_is_the_jobs_state(job: HetSlurmJob, fake_program: Fake) -> None:
    say(fake_program, "6+0|6|COMPLETED|a|p|1|None", "6+1|7|NODE_FAIL|b|p|1|NodeDown")
    assert (job.state, job.done()) == ("NODE_FAIL", True)


def test_a_state_that_is_new_to_us_is_shown_and_waited_for(
    job: HetSlurmJob, fake_program: Fake
) -> None:
    say(fake_program, "6+0|6|COMPLETED|a|p|1|None", "6+1|7|DREAMING|b|p|1|None")
    assert (job.state, job.done(force_check=True)) == ("DREAMING", False)
    with pytest.raises(TimeoutError, match=r"job 6 is DREAMING after 0\.1 s"):
        job.wait(0.1)


def test_an_outage_leaves_what_was_known(
    job: HetSlurmJob, fake_program: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    say(fake_program, "6+0|6|RUNNING|a|p|1|None", "6+1|7|RUNNING|b|p|1|None")
    assert job.state == "RUNNING"
    fake_program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with caplog.at_level(logging.WARNING):
        job.watcher.update()
    assert job.get_info("cache") == {"jobState": "RUNNING"}
    assert not job.watcher.is_over("6")
    assert "Unable to contact slurm controller" in caplog.text


def test_an_outage_before_the_first_answer_is_no_end(job: HetSlurmJob, fake_program: Fake) -> None:
    fake_program("squeue", "exit 1")
    assert (job.state, job.done(force_check=True)) == ("UNKNOWN", False)


@pytest.mark.parametrize(
    ("results", "state"),
    [
        ({}, "UNKNOWN"),
        ({"trainer": '["success", 3]'}, "UNKNOWN"),
        ({"trainer": '["success", 3]', "inference": '["success", "n0"]'}, "COMPLETED"),
        ({"trainer": '["error", "Traceback"]'}, "FAILED"),
    ],
)
def test_the_results_of_a_forgotten_job_decide(
    job: HetSlurmJob, fake_program: Fake, results: dict[str, str], state: str
) -> None:
    fake_program("squeue", "echo 'Invalid job id specified' >&2; exit 1")
    fake_program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    for role, text in results.items():
        leave(job, role, text)
    assert (job.state, job.done(force_check=True)) == (state, True)


def test_results_end_the_wait_without_a_question(job: HetSlurmJob, fake_program: Fake) -> None:
    calls = say(fake_program)
    leave(job, "trainer", '["success", 3]')
    leave(job, "inference", '["success", "n0"]')
    assert job.results() == {"trainer": [3], "inference": ["n0"]}
    assert not calls.exists()


def test_an_ended_job_is_not_asked_for_again(job: HetSlurmJob, fake_program: Fake) -> None:
    calls = say(fake_program, "6+0|6|CANCELLED|a|p|1|None")
    assert job.done(force_check=True)
    job.watcher.update()
    assert job.state == "CANCELLED"
    assert calls.read_text().splitlines().count("squeue") == 1


def test_cancel_waits_until_slurm_says_so(job: HetSlurmJob, fake_program: Fake) -> None:
    say(fake_program, "6+0|6|RUNNING|a|p|1|None")
    calls = fake_program("scancel", 'mv "$0.after" "$(dirname "$0")/squeue"')
    after = calls.with_name("scancel.after")
    after.write_text("#!/bin/sh\necho '6+0|6|CANCELLED|a|p|1|None'\n")
    after.chmod(0o755)
    job.cancel()
    assert calls.read_text().splitlines() == ["scancel", "6"]
    assert job.state == "CANCELLED"


def test_an_error_without_a_result_quotes_both_logs(job: HetSlurmJob, fake_program: Fake) -> None:
    say(fake_program, "6+0|6|NODE_FAIL|a|p|1|None")
    job.log_path("trainer", 0, "err").write_text("out of luck")
    (job.folder / "batch.log").write_text("srun: error: Node failure on a")
    said = str(job.exceptions()["trainer", 0])
    assert "left no result: state NODE_FAIL;" in said
    assert "out of luck" in said
    assert "Node failure on a" in said
