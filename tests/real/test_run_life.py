"""A run as one heterogeneous job: what ends it, what brings it back, what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_run import ROLES_DONE, LabRun

from agentrl.events import Network, read_folder
from launch.network import host_of
from slurm.files import publish
from slurm.lab import Lab

SHORT = ("cluster.time_min=2", "cluster.signal_s=60")
"""USR2 comes 30 to 60 s after the start: Slurm looks at limits every 30 s."""
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run(lab: Lab, odd_path: Path) -> LabRun:
    return LabRun(lab, odd_path)


def test_a_run_ends_with_results_by_role(run: LabRun) -> None:
    run.train("training.steps=4", "rollout.nodes=3")
    last = run.finish()
    assert (last.action, last.code, last.step_end, last.job) == ("done", 0, 4, run.job)
    assert run.causes(1) == ROLES_DONE
    assert run.state() == "COMPLETED"
    assert run.status()["state"] == "done"
    told = [one for one in read_folder(run.run.path / "events") if isinstance(one, Network)]
    assert {(one.node, one.interface) for one in told} == {
        (node, "eth0") for node in ("trn0", "inf0", "inf1", "inf2")
    }
    assert {one.why for one in told} == {"no other network has all nodes"}
    assert {"12 ordered pairs answered" in one.proof for one in told} == {True}


def test_a_trainer_that_exits_3_starts_again_while_the_engines_stay(run: LabRun) -> None:
    run.hold(3)
    run.train("training.steps=10")
    engines = run.until_up("inference")
    run.fault("trainer-0", "3 5")
    run.hold(8)
    run.until_step(7)
    assert run.pids("inference") == engines
    run.let_go()
    last = run.finish()
    assert (last.action, last.restarts, run.state()) == ("done", 1, "COMPLETED")
    assert len(run.run.attempts()) == 1


def test_a_killed_inference_role_starts_again_on_its_node(run: LabRun) -> None:
    run.hold(3)
    run.train("training.steps=4", "rollout.nodes=2")
    run.kill(run.until_up("inference", 1))
    run.until_up("inference", 1, lives=2)
    run.let_go()
    last = run.finish()
    assert (last.action, last.restarts) == ("done", 1)
    assert "killed by SIGKILL" in run.log()


def test_a_run_is_saved_ahead_of_its_limit_and_requeued_until_it_is_done(run: LabRun) -> None:
    run.hold(4)
    run.train("training.steps=12", *SHORT)
    last = run.finish()
    first = run.ledger()[0]
    assert (first.action, first.code, first.step_end) == ("requeue", 0, 3)
    assert "ahead of a time limit" in first.ended
    assert (last.action, last.step_end) == ("done", 12)
    assert {line.job for line in run.ledger()} == {run.job}
    assert last.began == run.ledger()[-2].ended
    log = (run.run.path / "submissions" / "0001" / "host.log").read_text()
    assert "restart 0" in log  # no log of an earlier life is truncated
    assert "restart 1" in log
    for number in (1, last.attempt):
        told = (run.run.attempt(number) / "logs" / "trainer-0.err").read_text()
        assert (f"attempt {number} of run" in told, "ends with code" in told) == (True, True)


def test_the_next_life_of_a_run_stays_away_from_a_node_that_a_role_called_suspect(
    run: LabRun,
) -> None:
    run.hold(4)
    run.train("training.steps=8")
    run.until_step(3)
    suspect = host_of(run.run, 1, "inference", 0)
    publish(run.run.attempt(1) / "suspect-0.json", b'{"reason": "3 faults of 2 engines"}')
    run.lab.run(["scancel", "--batch", "--signal=USR2", run.job])
    last = run.finish()
    assert (last.action, last.step_end, len(run.ledger())) == ("done", 8, 2)
    assert f"staying away from {suspect}: 3 faults of 2 engines" in run.log()
    assert host_of(run.run, 2, "inference", 0) not in ("", suspect), run.log()


def test_a_preempted_run_comes_back_and_goes_on(run: LabRun) -> None:
    run.hold(6)
    run.train("training.steps=12", "cluster.inference.partition=scavenge")
    run.until_checkpoint(4)
    nodes = ["--partition=urgent", "--nodelist=inf0,inf1,inf2", "--nodes=3", "--exclusive"]
    run.lab.run(["sbatch", *nodes, "--time=1", "--wrap=sleep 3"], cwd=run.folder)
    last = run.finish()
    first = run.ledger()[0]
    assert (last.action, last.step_end) == ("done", 12)
    assert first.action in ("requeue", "gone", "lost")
    assert first.step_end >= 4


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_a_run_outlives_the_death_of_a_node(run: LabRun, role: str) -> None:
    run.hold(6)
    run.train("training.steps=12")
    run.until_checkpoint(4)
    node = host_of(run.run, 1, role, 0)
    run.lab.kill_node(node)
    if role == "trainer":  # the only node of its partition
        run.until(lambda: "down" in run.lab.states()[node], "the node's death is seen")
        run.lab.start_node(node)
    last = run.finish(limit_s=600)
    assert (last.action, last.step_end) == ("done", 12)
    assert len(run.ledger()) == 2
    assert run.ledger()[0].step_end >= 4


def test_a_trainer_that_dies_at_every_start_ends_the_run_after_k_attempts(run: LabRun) -> None:
    run.fault("trainer-0", "kill 0 always")
    run.train("max_attempts_without_progress=2")
    last = run.finish()
    assert [line.action for line in run.ledger()] == ["requeue", "stop"]
    assert [line.restarts for line in run.ledger()] == [3, 3]
    assert "2 launch attempts in a row made no new checkpoint" in last.ended
    assert run.state() == "FAILED"


def test_a_trainer_that_fails_alike_is_not_tried_again(run: LabRun) -> None:
    run.fault("trainer-0", "3 1 always")
    run.train()
    last = run.finish()
    assert (last.action, last.code, len(run.ledger())) == ("stop", 1, 1)
    assert "exited 3 and left no exit record" in last.ended


def test_a_cancelled_run_stays_cancelled_and_can_be_resumed(run: LabRun) -> None:
    run.train("training.steps=1000")
    run.until_step(5)
    run.lab.run(["scancel", run.job])
    run.until(lambda: run.state() == "CANCELLED", "the job is cancelled")
    run.until_gone()
    assert run.run.checkpoint_step() >= 4
    taken = len(run.steps())
    run.agentrl("resume", run.run.path)
    run.until(lambda: len(run.steps()) > taken, "a step after the resume")
    assert run.steps().count(1) == 1
    run.agentrl("stop", run.run.path)
    assert run.finish().began == "resumed"


def test_a_run_that_is_told_to_stop_saves_and_leaves_the_queue(run: LabRun) -> None:
    run.train("training.steps=1000")
    run.until_step(3)
    assert run.status()["state"] == "running"
    assert "RUNNING on trn0" in run.status()["trainer"]
    said = run.agentrl("resume", run.run.path, check=False)
    assert f"its job {run.job} is RUNNING" in said
    assert "ended at step" in run.agentrl("stop", run.run.path)
    last = run.finish()
    assert (last.action, last.code) == ("stop", 75)
    assert last.step_end >= 3
    assert run.status()["state"] == "saved"


def test_a_run_that_still_waits_is_stopped_by_cancelling_it(run: LabRun) -> None:
    run.train("cluster.inference.extra=[--begin=now+1hour]")
    assert run.status()["state"] == "pending"
    assert f"cancelled job {run.job}" in run.agentrl("stop", run.run.path)
    assert run.state() == "CANCELLED"


def test_a_wrong_partition_is_refused_before_anything_is_queued(run: LabRun) -> None:
    said = run.train("cluster.inference.partition=nowhere", check=False)
    assert "invalid partition specified: nowhere" in said
    assert run.lab.run(["squeue", "--noheader"]).stdout == ""
    assert run.status()["state"] == "not begun"


def test_a_pin_that_no_node_has_ends_the_run_with_the_evidence(run: LabRun) -> None:
    run.train("cluster.interface_pin=eth9")
    last = run.finish()
    assert (last.action, last.code, len(run.ledger())) == ("stop", 2, 1)
    assert "interface_pin='eth9'" in last.ended


def test_two_runs_at_once_do_not_disturb_each_other(run: LabRun) -> None:
    other = LabRun(run.lab, run.folder, name="other")
    shares = ["cluster.trainer.gpus_per_node=4", "training.steps=6"]
    run.train(*shares)
    other.train(*shares)
    assert run.finish().step_end == other.finish().step_end == 6
    assert run.job != other.job


def test_a_run_can_be_submitted_from_inside_another_job(run: LabRun) -> None:
    run.train("training.steps=4")
    run.finish()
    inner = [*run.command(), "resume", str(run.run.path), "training.steps=6"]
    words = ["srun", "--partition=all", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", *inner]
    run.lab.run(words, cwd=run.folder)
    assert run.finish().step_end == 6
    assert "restart 0" in run.log()


def test_one_homogeneous_allocation_serves_as_well(run: LabRun) -> None:
    whole = ["cluster.layout=homogeneous", "rollout.nodes=2", "training.steps=4"]
    run.train(*whole, "cluster.trainer.partition=all", "cluster.inference.partition=all")
    assert (run.finish().action, run.state()) == ("done", "COMPLETED")


def test_a_chain_of_jobs_goes_on_where_requeue_is_not_wanted(run: LabRun) -> None:
    run.hold(4)
    run.train("cluster.requeue=chain", "training.steps=12", *SHORT)
    last = run.finish(limit_s=400)
    assert last.action == "done"
    assert len(run.jobs) == 4
    assert len({line.job for line in run.ledger()}) == len(run.ledger()) >= 2
