"""Nodes that a role called suspect: the next job of the run stays away from them if it can."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig
from launch import cluster_run, submission
from launch.attempt import Attempt
from launch.host import decided
from launch.run_dir import RunDir, create
from launch.suspects import KEPT_S, suspects
from slurm.exit_record import ExitRecord

Fake = Callable[..., Path]
ENDED = "echo '7|7|COMPLETED|n0|all||None'; echo '8|8|CANCELLED||all||None'"
SAVED = ExitRecord(role="trainer", node=0, code=75, cause="saved", step=2)


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    """A run on a cluster whose second node of inference is suspect."""
    return made(odd_path, ClusterConfig(name="lab"))


def made(folder: Path, cluster: ClusterConfig) -> RunDir:
    run = create(RunConfig(name="r", runs_dir=str(folder), cluster=cluster), ["test"])
    attempt = run.attempt(1)
    (attempt / "exit").mkdir(parents=True)
    hosts = {"trainer": ["n0"], "inference": ["n1", "n2"]}
    (attempt / "launcher.json").write_text(json.dumps({"hosts": hosts, "job": "7"}))
    (attempt / "suspect-1.json").write_text('{"reason": "3 faults of 2 engines"}')
    submission.record(run, 1, ["7", "8"], began="started", cluster="lab")
    (run.path / "checkpoints" / "step-000002").mkdir(parents=True)
    return run


def test_a_suspect_is_known_by_slurm_s_name_of_its_node(run: RunDir) -> None:
    assert [(one.host, one.reason) for one in suspects(run)] == [("n2", "3 faults of 2 engines")]


def test_after_a_day_a_node_is_no_suspect_any_more(run: RunDir) -> None:
    before = time.time() - KEPT_S - 60
    os.utime(run.attempt(1) / "suspect-1.json", (before, before))
    assert suspects(run) == []


def test_the_next_submission_excludes_suspects_besides_what_the_config_excludes(
    run: RunDir, fake_program: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_program("sbatch", 'for word; do [ "$word" = --test-only ] && exit; done; echo 41')
    fake_program("squeue", ENDED)
    cluster_run.launch(run, ["agentrl"], began="resumed")
    script = (run.path / "submissions" / "0002" / "script.sbatch").read_text()
    assert script.count("#SBATCH --exclude=n2\n") == 2
    assert not list(run.path.rglob(cluster_run.DRAFT))


def test_suspects_are_used_where_the_job_could_not_run_without_them(
    run: RunDir, fake_program: Fake
) -> None:
    fake_program("sbatch", 'for word; do file=$word; done; ! grep -q exclude "$file" && echo 41')
    fake_program("squeue", ENDED)
    cluster_run.launch(run, ["agentrl"], began="resumed")
    script = (run.path / "submissions" / "0002" / "script.sbatch").read_text()
    assert "exclude" not in script


def test_a_requeue_is_told_which_nodes_to_stay_away_from(run: RunDir, fake_program: Fake) -> None:
    fake_program("sbatch", "exit 0")
    assert decided(Attempt.of(run, 1), SAVED, asked="limit") == "requeue n2 n2"


def test_a_requeue_on_which_slurm_would_not_agree_names_none(
    run: RunDir, fake_program: Fake
) -> None:
    fake_program("sbatch", "echo 'nodes are not available' >&2; exit 1")
    assert decided(Attempt.of(run, 1), SAVED, asked="limit") == "requeue"


def test_the_waiting_jobs_of_a_chain_are_told_at_once(odd_path: Path, fake_program: Fake) -> None:
    run = made(odd_path, ClusterConfig(name="lab", requeue="chain"))
    fake_program("sbatch", "exit 0")
    fake_program("squeue", "echo '7|7|RUNNING|n0|all|1:00|None'; echo '8|8|PENDING||all|1:00|None'")
    steered = fake_program("scontrol", "exit 0")
    assert decided(Attempt.of(run, 1), SAVED, asked="limit") == "requeue n2 n2"
    calls = [f"scontrol\nupdate\nJobId=8+{part}\nExcNodeList=n2\n" for part in (0, 1)]
    assert steered.read_text() == "".join(calls)


def test_a_chain_that_cannot_be_told_goes_on(odd_path: Path, fake_program: Fake) -> None:
    run = made(odd_path, ClusterConfig(name="lab", requeue="chain"))
    fake_program("sbatch", "exit 0")
    fake_program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert decided(Attempt.of(run, 1), SAVED, asked="limit").startswith("requeue")
