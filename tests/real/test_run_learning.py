"""Whole runs on the small real cluster: real engines, sandboxes and steps, and real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from lab_run import ROOT, LabRun

from launch.cli import main
from slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(2400)]
LONG_S = 900.0
"""Four nodes share this machine's cores."""
CONFIG = """\
extends: {root}/configs/demo.yaml
name: tiny
runs_dir: {folder}/runs
agent: {{prompts: {root}/configs/agents/repair.yaml}}
tasks: {{folder: {folder}/tasks, train: 4, held_out: 4, unseen_sites: 2, unseen_functions: 2}}
model: {{path: {folder}/model, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 2}}
rollout: {{concurrency: 4, attempts_per_task: 4}}
sft: {{traces: 48, expert_accuracy: 0.5, epochs: 12}}
training: {{steps: 6, groups_per_step: 2, checkpoint_every: 2}}
grace_s: 40
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared and fine-tuned tiny model, in a folder with an awkward name."""
    folder = tmp_path_factory.mktemp("it's a cluster")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder, root=ROOT))
    assert main(["prepare", str(path)]) == 0
    two = (folder / "tasks" / "sft.jsonl").read_bytes().splitlines(keepends=True)[:2]
    for split in ("sft", "train"):  # two tasks learnt by heart: some tries of each are solved
        (folder / "tasks" / f"{split}.jsonl").write_bytes(b"".join(two))
    assert main(["sft", str(path)]) == 0
    return path


def begin(lab: Lab, config: Path, name: str, *overrides: str) -> LabRun:
    run = LabRun(lab, config.parent, name=name)
    model = config.parent / "runs" / "tiny" / "sft" / "model"
    run.agentrl("train", config, "cluster=lab", f"name={name}", f"model.path={model}", *overrides)
    return run


def is_clean(run: LabRun) -> bool:
    return "audit clean" in run.agentrl("audit", run.run.path)


def test_the_demo_runs_to_its_end_on_three_inference_nodes_and_a_trainer_node(
    lab: Lab, config: Path
) -> None:
    run = begin(lab, config, "whole", "rollout.nodes=3")
    last = run.finish(limit_s=LONG_S)
    assert (last.action, last.step_end) == ("done", 6)
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert is_clean(run)
    assert set(run.status()["engines"]) == {"0/engine-0", "1/engine-0", "2/engine-0"}


def test_a_run_outlives_its_trainer_s_process_and_the_death_of_a_node(
    lab: Lab, config: Path
) -> None:
    run = begin(lab, config, "hurt", "training.steps=10")
    run.until_checkpoint(2, LONG_S)
    engines = run.pids("inference")
    for pid in run.pids("trainer"):
        os.kill(pid, signal.SIGKILL)
    run.until_checkpoint(4, LONG_S)
    assert run.pids("inference") == engines
    lab.kill_node("inf0")
    last = run.finish(limit_s=LONG_S)
    assert (last.action, last.step_end) == ("done", 10)
    assert len(run.ledger()) == 2
    assert is_clean(run)


def test_a_run_that_hears_of_its_limit_is_saved_requeued_and_goes_on(
    lab: Lab, config: Path
) -> None:
    run = begin(lab, config, "limited", "training.steps=8", "rollout.nodes=2")
    run.until_checkpoint(2, LONG_S)
    lab.run(["scancel", "--batch", "--signal=USR2", run.job])  # as Slurm does ahead of the limit
    last = run.finish(limit_s=LONG_S)
    assert [line.action for line in run.ledger()] == ["requeue", "done"]
    assert last.step_end == 8
    assert run.steps() == list(range(1, 9))
    assert is_clean(run)


def test_groups_reach_the_trainer_by_socket_across_nodes(lab: Lab, config: Path) -> None:
    run = begin(lab, config, "socket", "handoff=socket", "rollout.nodes=2", "training.steps=4")
    assert run.finish(limit_s=LONG_S).action == "done"
    assert is_clean(run)
