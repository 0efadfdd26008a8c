from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl import events as ev
from agentrl.errors import CheckpointError, PublishError
from agentrl.training import checkpoint, rng
from agentrl.training.checkpoint import Checkpoint, load_latest, read_consumed, save, verify
from agentrl.training.torch_backend import BackendState


def state(step: int, **more) -> Checkpoint:
    backend = BackendState(
        model={"w": torch.full((3, 2), float(step))},
        optimizer={"exp_avg/w": torch.ones(3, 2), "step/w": torch.tensor(float(step))},
        updates=step,
    )
    return Checkpoint(step=step, version=step, backend=backend, config_hash="c", **more)


@pytest.fixture
def write(tiny_model, odd_path):
    folder = odd_path / "checkpoints"

    def write(step: int, keep: int = 2, **more):
        return save(folder, state(step, **more), attempt=1, keep=keep, model_folder=tiny_model)

    write.folder = folder
    return write


def test_a_checkpoint_is_read_back_as_it_was(write):
    write(20, consumed={0: "trained", 1: "filtered:stale", 2: "trained"}, pending={"x": 2.0})
    found = load_latest(write.folder)
    assert (found.step, found.version, found.backend.updates) == (20, 20, 20)
    assert found.consumed == {0: "trained", 1: "filtered:stale", 2: "trained"}
    assert found.pending == {"x": 2.0}
    assert torch.equal(found.backend.model["w"], torch.full((3, 2), 20.0))
    assert float(found.backend.optimizer["step/w"]) == 20.0
    assert read_consumed(write.folder) == found.consumed


def test_there_is_nothing_to_load_before_the_first(tmp_path):
    assert load_latest(tmp_path / "none") is None
    assert read_consumed(tmp_path / "none") == {}


def flip_a_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_changed_file_is_refused_and_the_one_before_it_is_taken(write, tmp_path):
    write(10, consumed={0: "trained"})
    newest = write(20, consumed={0: "trained", 1: "trained"})
    flip_a_byte(newest / "optimizer.safetensors")
    events = ev.EventWriter(tmp_path / "events", "trainer")
    assert load_latest(write.folder, events).step == 10
    seen = [(event.step, event.phase) for event in ev.read(events.path)]
    assert seen == [(20, "refused"), (10, "loaded")]
    assert read_consumed(write.folder) == {0: "trained"}


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "consumed.json"])
def test_a_checkpoint_that_lacks_a_file_is_refused(write, name):
    path = write(10)
    (path / name).unlink()
    with pytest.raises(CheckpointError):
        verify(path)


def test_a_file_that_the_disk_does_not_give_back_is_refused_as_a_changed_one_is(write):
    write(10, consumed={0: "trained"})
    newest = write(20)
    (newest / "state.json").unlink()
    (newest / "state.json").symlink_to("/proc/self/mem")  # a file of 0 bytes; reading: EIO
    manifest = json.loads((newest / "manifest.json").read_bytes())
    manifest["files"]["state.json"]["size"] = 0
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="Input/output error"):
        verify(newest)
    assert load_latest(write.folder).step == 10


@pytest.mark.parametrize("files", [3, ["a"], {"a": 3}, {"a": {}}, {"a": {"size": 1}}])
def test_a_manifest_of_another_form_is_refused(write, files):
    path = write(10)
    (path / "manifest.json").write_text(json.dumps({"files": files}))
    with pytest.raises(CheckpointError, match="not readable"):
        verify(path)


def test_starting_over_in_silence_is_refused_when_none_verifies(write):
    flip_a_byte(write(10) / "model.safetensors")
    with pytest.raises(CheckpointError, match="start a new run"):
        load_latest(write.folder)


def test_only_the_newest_good_ones_are_kept(write):
    for step in (10, 20, 30, 40):
        write(step)
    kept = {name for name in os.listdir(write.folder) if name.startswith("step")}
    assert kept == {"step-000030", "step-000040"}


def test_a_bad_checkpoint_does_not_push_out_a_good_one(write):
    write(10)
    flip_a_byte(write(20) / "model.safetensors")
    write(30)
    assert load_latest(write.folder).step == 30
    flip_a_byte(write.folder / "step-000030" / "model.safetensors")
    assert load_latest(write.folder).step == 10


def test_a_checkpoint_moved_aside_when_the_trainer_died_is_still_found(write):
    path = write(10, consumed={0: "trained"})
    path.rename(path.with_name("step-000010.superseded"))
    assert load_latest(write.folder).step == 10
    assert read_consumed(write.folder) == {0: "trained"}
    write(20, keep=2)
    assert sorted(os.listdir(write.folder)) == ["LATEST.json", "step-000010", "step-000020"]


@pytest.mark.usefixtures("small_files_only")
def test_a_disk_that_is_full_leaves_the_older_checkpoint_and_nothing_else(write, tiny_model):
    write(10, consumed={0: "trained"})
    large = state(20)
    large.backend.model["w"] = torch.ones(500_000)
    with pytest.raises(PublishError, match="older checkpoints are untouched"):
        save(write.folder, large, attempt=1, keep=1, model_folder=tiny_model)
    assert load_latest(write.folder).step == 10
    assert sorted(os.listdir(write.folder)) == ["LATEST.json", "step-000010"]


def test_what_a_killed_trainer_left_is_removed(write):
    (write.folder / "step-000010.tmp-0001").mkdir(parents=True)
    (write.folder / "step-000010.tmp-0001" / "model.safetensors").write_text("half")
    assert load_latest(write.folder) is None
    write(10)
    assert sorted(os.listdir(write.folder)) == ["LATEST.json", "step-000010"]


def test_a_checkpoint_is_a_model_folder_too(write, tiny_model):
    path = write(10)
    assert (path / "config.json").read_bytes() == (tiny_model / "config.json").read_bytes()


def test_no_file_of_a_checkpoint_is_a_pickle(write):
    path = write(10)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


@given(st.dictionaries(st.integers(0, 300), st.sampled_from(["trained", "filtered:stale"])))
def test_any_consumed_draws_survive_their_compact_form(consumed):
    table = checkpoint._compact(consumed)
    back = {
        draw: why
        for why, spans in table.items()
        for first, last in spans
        for draw in range(first, last + 1)
    }
    assert back == consumed


def test_the_three_generators_go_on_where_they_were():
    rng.seed_all(3)
    random.gauss(0, 1)
    states = rng.capture()
    first = (random.random(), np.random.rand(), float(torch.rand(1)))
    rng.restore(states)
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == first
