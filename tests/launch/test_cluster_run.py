"""A run handed to Slurm: the script, what is refused before it, what is written after it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import RolloutConfig, RunConfig
from agentrl.config_cluster import ClusterConfig, RoleResources
from agentrl.errors import ConfigError, LaunchError, SubmitError
from launch import cluster_run, resume, status, stop, submission, train
from launch.run_dir import RunDir
from slurm.exit_record import DONE

Fake = Callable[..., Path]
GOLDEN = Path(__file__).parent / "golden"
CLUSTERS = {
    "het": ClusterConfig(
        name="x",
        account="project_1",
        signal_s=300,
        trainer=RoleResources(partition="train", cpus_per_task=16, gres="gpu:mi355x:8"),
        inference=RoleResources(partition="serve", cpus_per_task=96, gres="gpu:mi355x:8"),
        modules=["rocm/7.2"],
        environment={"MIOPEN_USER_DB_PATH": "/scratch/$USER/miopen"},
        interface_hints=["hsn*"],
    ),
    "chain": ClusterConfig(name="x", requeue="chain", interface_pin="10.2.0.0/16"),
    "homogeneous": ClusterConfig(name="x", layout="homogeneous"),
}
SBATCH = 'for word; do [ "$word" = --test-only ] && exit; done; echo 41'
SQUEUE = (
    "echo '41+0|41|{state}|trn0|trainer|58:00|None'; echo '41+1|42|{state}|inf0|inference||None'"
)


@pytest.fixture
def config(odd_path: Path) -> Path:
    """A config on the cluster `lab` with a model and a task that are there."""
    model = odd_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    names = ("instance_id", "repo", "patch", "image_name", "problem_statement")
    task = dict.fromkeys(names, "x") | {"FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}
    (odd_path / "train.jsonl").write_text(json.dumps(task))
    path = odd_path / "run.yaml"
    path.write_text(
        f'cluster: lab\nname: r\nruns_dir: "{odd_path}"\nmodel: {{path: "{model}"}}\n'
        f'tasks: {{folder: "{odd_path}"}}\n'
    )
    return path


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_script_of_a_run_is_the_golden_one(name: str) -> None:
    config = RunConfig(cluster=CLUSTERS[name], rollout=RolloutConfig(nodes=3))
    run = RunDir(Path("/scratch/it's 100%/runs/r"))
    text = cluster_run.script_of(config, run, 1, began="started")
    path = GOLDEN / f"run_{name}.sbatch"
    text = text.replace(shlex.quote(sys.executable), "/venv/bin/python")
    assert path.read_text() == text, "if that is meant, write the new text there"


ONCE = """
import os, signal, sys
from pathlib import Path
mark = Path(sys.argv[1])
if not mark.exists():  # as one that was not deaf in time
    mark.touch()
    signal.signal(int(sys.argv[2]), signal.SIG_DFL)
    os.kill(os.getpid(), int(sys.argv[2]))
os.killpg(0, signal.SIGTERM)
print("said")
sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_what_the_script_asks_is_asked_again_if_a_signal_was_first(
    tmp_path: Path, number: signal.Signals
) -> None:
    text = (GOLDEN / "run_het.sbatch").read_text()
    traps, function = text[text.index("asked=  #") :].split("say()", 1)
    words = shlex.join([sys.executable, "-c", ONCE, str(tmp_path / "mark"), str(int(number))])
    script = f"{traps}say(){function.partition('# -- ')[0]}deaf {words}; echo $? $asked"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout == "said\n7 term\n"


def test_a_dry_run_prints_the_bytes_that_are_queued_and_writes_nothing(
    config: Path, fake_program: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    log = fake_program("sbatch", SBATCH)
    assert train.main([str(config), "--dry-run"]) == DONE
    printed = capsys.readouterr().out
    assert not (config.parent / "r").exists()
    assert train.main([str(config)]) == DONE
    script = config.parent / "r" / "submissions" / "0001" / "script.sbatch"
    assert script.read_text() == printed
    flags = [word for word in log.read_text().splitlines() if word.startswith("--")]
    assert flags == ["--test-only", "--parsable"]
    assert "agentrl watch" in capsys.readouterr().out


def test_what_sbatch_refuses_is_told_in_its_words_and_nothing_is_queued(
    config: Path, fake_program: Fake
) -> None:
    fake_program("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SubmitError, match="invalid partition"):
        train.main([str(config)])
    assert submission.newest(RunDir(config.parent / "r")) is None


def test_a_run_that_is_queued_is_shown_and_not_queued_twice(
    config: Path, fake_program: Fake
) -> None:
    fake_program("sbatch", SBATCH)
    asked = fake_program("squeue", SQUEUE.format(state="PENDING"))
    train.main([str(config)])
    run = RunDir(config.parent / "r")
    with pytest.raises(LaunchError, match="job 41 is PENDING"):
        resume.main([str(run.path)])
    asked.unlink()
    found = status.facts(run)
    assert (found["state"], found["job"]) == ("pending", "41")
    assert found["inference"] == "PENDING on inf0"
    assert asked.read_text().splitlines().count("squeue") == 1


def test_a_job_that_waits_is_stopped_by_cancelling_it(config: Path, fake_program: Fake) -> None:
    fake_program("sbatch", SBATCH)
    gone = config.parent / "gone"
    pending, ended = SQUEUE.format(state="PENDING"), SQUEUE.format(state="CANCELLED")
    fake_program("squeue", f'if [ -e "{gone}" ]; then {ended}; else {pending}; fi')
    cancelled = fake_program("scancel", f'touch "{gone}"')
    train.main([str(config)])
    assert stop.main([str(config.parent / "r")]) == DONE
    assert cancelled.read_text().splitlines() == ["scancel", "41"]


def test_a_chain_is_queued_whole_each_job_after_the_one_before(
    config: Path, fake_program: Fake
) -> None:
    log = fake_program("sbatch", SBATCH)
    train.main([str(config), "cluster.requeue=chain", "cluster.chain_depth=3"])
    assert log.read_text().count("--parsable") == 3
    assert log.read_text().count("--dependency=afterany:41") == 2
    script = (config.parent / "r" / "submissions" / "0001" / "script.sbatch").read_text()
    assert "--no-requeue" in script
    assert "scontrol requeue" not in script


def test_a_limit_that_leaves_no_time_to_save_is_refused(odd_path: Path) -> None:
    config = RunConfig(grace_s=90, cluster=ClusterConfig(name="x", signal_s=60))
    with pytest.raises(ConfigError, match="signal_s=60 is not over grace_s=90"):
        cluster_run.job_spec(config, RunDir(odd_path), 1)


def test_there_is_no_script_of_a_run_on_this_machine(config: Path) -> None:
    with pytest.raises(ConfigError, match="cluster=local"):
        train.main([str(config), "cluster=local", "--dry-run"])


def test_a_resumed_run_may_move_to_another_cluster(config: Path) -> None:
    moved = resume.changed(RunConfig(), ["cluster=lab", "cluster.time_min=5"])
    assert (moved.cluster.name, moved.cluster.time_min) == ("lab", 5)
