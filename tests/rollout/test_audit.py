import json

import pytest
import torch

from agentrl.audit import audit
from agentrl.config import RunConfig, save
from agentrl.errors import RecordError
from agentrl.events import EventWriter, TrajectoryEvent
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group
from agentrl.training import checkpoint
from agentrl.training.torch_backend import BackendState
from agentrl.weights.version import publish_version


def write_checkpoint(run_dir, step, consumed):
    state = BackendState(model={"w": torch.ones(2)}, optimizer={}, updates=step)
    made = checkpoint.Checkpoint(step=step, version=step, backend=state, consumed=consumed)
    model = run_dir.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return checkpoint.save(run_dir / "checkpoints", made, attempt=1, keep=3, model_folder=model)


@pytest.fixture
def run_dir(tmp_path):
    """Draws 0 to 9: 0–3 trained, 4–5 filtered, 6 waiting, 7–9 to be issued again."""
    run = tmp_path / "it's a run"
    run.mkdir()
    save(RunConfig(), run / "config.yaml")
    write_checkpoint(run, 1, dict.fromkeys(range(3), "trained"))
    consumed = dict.fromkeys(range(4), "trained") | dict.fromkeys((4, 5), "filtered:no signal")
    write_checkpoint(run, 2, consumed)
    SpoolWriter(run / "spool", 0).write(group(6))
    publish_version(
        run / "weights",
        run="demo",
        attempt=1,
        version=2,
        step=2,
        tensors=[("w", torch.ones(2))],
        model_folder=tmp_path / "model",
        consumed=[[0, 5]],
    )
    events = EventWriter(run / "events", "inference", node="0")
    for draw in (0, 9, -1):
        events.write(
            TrajectoryEvent(trajectory="x", draw=draw, task="t", attempt=0, cause="submitted")
        )
    events.close()
    return run


def group(draw):
    return Group(draw=draw, task_id="t", trajectories=())


def test_a_whole_run_is_clean_and_every_draw_accounted_for(run_dir):
    found = audit(run_dir)
    assert found.ok, found.problems
    assert found.lines == [
        "checkpoints that verify: step-000001, step-000002",
        "draws 0 to 9: 10",
        "  trained: 4",
        "  filtered:no signal: 2",
        "  waiting in the spool: 1",
        "  to be issued again: 3",
        "weights: version 2 of attempt 1",
        "audit clean",
    ]


def test_a_run_that_has_only_begun_is_clean(tmp_path):
    save(RunConfig(), tmp_path / "config.yaml")
    assert audit(tmp_path).ok


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"no config\.yaml"):
        audit(tmp_path)


def covered_file(run):
    SpoolWriter(run / "spool", 0).write(group(3))


def two_files(run):
    SpoolWriter(run / "spool", 1).write(group(6))


def torn_file(run):
    path = run / "spool" / "0" / "00000006.parquet"
    path.write_bytes(path.read_bytes()[:-9])


def changed_checkpoint(run):
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def missing_manifest(run):
    (run / "checkpoints" / "step-000001" / "manifest.json").unlink()


def forgotten_draw(run):
    write_checkpoint(run, 3, dict.fromkeys((0, 1, 3, 4, 5), "trained"))


def no_reason(run):
    write_checkpoint(run, 3, dict.fromkeys(range(6), "trained") | {7: "filtered:"})


def changed_weights(run):
    path = run / "weights" / "v000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def short_weights(run):
    (run / "weights" / "v000002" / "config.json").write_text("{ }")


def torn_latest(run):
    (run / "weights" / "LATEST.json").write_text(json.dumps({"version": 2})[:-2])


PLANTED = {
    covered_file: "of draw 3 is covered by the checkpoint",
    two_files: "draw 6 waits twice",
    torn_file: "torn",
    changed_checkpoint: "sha256 is not the manifest's",
    missing_manifest: "manifest.json: not readable",
    forgotten_draw: "forgot [[2, 2]]",
    no_reason: "without a reason",
    changed_weights: "another sha256",
    short_weights: "bytes instead of",
    torn_latest: "not an announcement",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_each_planted_fault_is_found(run_dir, plant):
    plant(run_dir)
    found = audit(run_dir)
    assert not found.ok
    assert PLANTED[plant] in " ".join(found.problems)
    assert found.lines[-1] == f"{len(found.problems)} problems"
