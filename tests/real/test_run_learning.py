"""Whole runs on the small real cluster: real engines, sandboxes and steps, and real kills."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_run import ROLES_DONE, LabRun

from benchmarks.tiny_run import model_of, prepared
from launch.network import host_of
from slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(2400)]
LONG_S = 900.0
"""Four nodes share this machine's cores."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared and fine-tuned tiny model, in a folder with an awkward name."""
    return prepared(tmp_path_factory.mktemp("it's a cluster"))


def begin(lab: Lab, config: Path, name: str, *overrides: str) -> LabRun:
    run = LabRun(lab, config.parent, name=name)
    given = [f"name={name}", f"model.path={model_of(config)}", *overrides]
    run.agentrl("train", config, "cluster=lab", *given)
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
    assert run.causes(1) == ROLES_DONE
    assert is_clean(run)
    assert set(run.status()["engines"]) == {"0/engine-0", "1/engine-0", "2/engine-0"}


@pytest.mark.skipif(
    "AGENTRL_FAULTS" not in os.environ,
    reason="four minutes: AGENTRL_FAULTS=1 python -m pytest tests/real -k no_fault",
)
def test_no_fault_costs_a_run_a_draw_a_step_or_a_sandbox(lab: Lab, config: Path) -> None:
    scavenge = ["cluster.inference.partition=scavenge", "cluster.inference.constraint=inference"]
    endless = ["training.steps=100000", "training.checkpoint_every=1"]
    run = begin(lab, config, "hurt", *scavenge, *endless)
    for fault in (trainer_process, inference_node, preemption, trainer_node, cancellation):
        goes_on(run)
        fault(run)
    goes_on(run)
    run.agentrl("stop", run.run.path)
    assert run.finish(limit_s=LONG_S).action == "stop"
    assert run.ledger()[0].restarts >= 1  # a role of the dead node may have been tried again
    assert is_clean(run)


def goes_on(run: LabRun) -> None:
    run.until_checkpoint(run.run.checkpoint_step() + 2, LONG_S)


@contextlib.contextmanager
def another_attempt(run: LabRun) -> Iterator[None]:
    """Wait, after the block, until the run has begun anew."""
    before = len(run.run.attempts())
    yield
    run.until(lambda: len(run.run.attempts()) > before, "another launch attempt", LONG_S)


def trainer_process(run: LabRun) -> None:
    engines = run.pids("inference")
    run.kill(run.pids("trainer"))
    run.until_up("trainer", lives=2)
    assert run.pids("inference") == engines


def inference_node(run: LabRun) -> None:
    node = host_of(run.run, 1, "inference", 0)
    with another_attempt(run):
        run.lab.kill_node(node)
    run.lab.start_node(node)


def preemption(run: LabRun) -> None:
    nodes = ["--partition=urgent", "--nodelist=inf[0-2]", "--nodes=3", "--exclusive"]
    with another_attempt(run):
        run.lab.run(["sbatch", "--output=/dev/null", *nodes, "--time=1", "--wrap=true"])


def trainer_node(run: LabRun) -> None:
    with another_attempt(run):
        run.lab.kill_node("trn0")
        run.until(lambda: "down" in run.lab.states()["trn0"], "the node's death is seen")
        run.lab.start_node("trn0")


def cancellation(run: LabRun) -> None:
    run.lab.run(["scancel", run.job])
    run.until(lambda: run.state() == "CANCELLED", "the job is cancelled")
    with another_attempt(run):
        run.agentrl("resume", run.run.path)


def test_a_run_that_hears_of_its_limit_is_saved_requeued_and_goes_on(
    lab: Lab, config: Path
) -> None:
    run = begin(lab, config, "limited", "training.steps=12", "rollout.nodes=2")
    run.until_checkpoint(2, LONG_S)
    lab.run(["scancel", "--batch", "--signal=USR2", run.job])  # as Slurm does ahead of the limit
    last = run.finish(limit_s=LONG_S)
    assert [line.action for line in run.ledger()] == ["requeue", "done"]
    assert last.step_end == 12
    assert run.steps() == list(range(1, 13))
    assert is_clean(run)


def test_groups_reach_the_trainer_by_socket_across_nodes(lab: Lab, config: Path) -> None:
    run = begin(lab, config, "socket", "handoff=socket", "rollout.nodes=2", "training.steps=4")
    assert run.finish(limit_s=LONG_S).action == "done"
    assert is_clean(run)
