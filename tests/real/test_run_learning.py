"""Whole runs on the small real cluster: real engines, sandboxes and steps, and real kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_run import ROLES_DONE, LabRun

from benchmarks.tiny_run import model_of, prepared
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
