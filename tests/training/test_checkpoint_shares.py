from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from fabricate import fill_spool

from agentrl import events as ev
from agentrl.errors import PublishError
from agentrl.training import checkpoint
from agentrl.training.backend import BackendState, Part
from agentrl.training.checkpoint import Checkpoint, Files, load_latest
from agentrl.training.loop import train
from agentrl.training.model_folder import load_model
from agentrl.training.shares import write_share
from agentrl.training.torch_backend import TorchBackend


def share_of(state: BackendState, part: Part) -> BackendState:
    def taken(tensors):
        return {name: one for number, (name, one) in enumerate(tensors.items()) if part.has(number)}

    return BackendState(
        model=taken(state.model), optimizer=taken(state.optimizer), updates=state.updates
    )


def save_in_shares(folder, state, model, ranks=3, *, writes=(1, 2), limit_s=60.0):
    temporary = checkpoint.begin(folder, 4, 1)
    for rank in writes:
        write_share(temporary, share_of(state, Part(rank, ranks)), Part(rank, ranks))
    own = Checkpoint(step=4, version=4, backend=share_of(state, Part(0, ranks)))
    files = Files(model_folder=model, keep=2, attempt=1, ranks=ranks, limit_s=limit_s)
    return checkpoint.complete(temporary, own, files)


@pytest.fixture
def state(tiny_model, tiny_config):
    return TorchBackend(tiny_model, tiny_config).state()


def test_the_shares_of_all_ranks_read_back_as_one_state(state, tiny_model, odd_path):
    folder = odd_path / "checkpoints"
    path = save_in_shares(folder, state, tiny_model)
    assert len(list(path.glob("model-*-of-00003.safetensors"))) == 3
    found = load_latest(folder).backend
    assert found.model.keys() == state.model.keys()
    assert all(torch.equal(found.model[name], state.model[name]) for name in state.model)
    assert not list(path.glob("share-*"))


def test_a_checkpoint_in_shares_is_a_model_folder_too(state, tiny_model, tmp_path):
    path = save_in_shares(tmp_path / "checkpoints", state, tiny_model)
    loaded = dict(load_model(path).named_parameters())
    assert all(torch.equal(loaded[name], state.model[name]) for name in state.model)
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == state.model.keys()


def test_a_rank_that_cannot_write_is_named_with_the_systems_words(state, tiny_model, tmp_path):
    folder = tmp_path / "checkpoints"
    temporary = checkpoint.begin(folder, 4, 1)
    (temporary / "model-00002-of-00002.safetensors").mkdir()  # as a full disk would, it refuses
    write_share(temporary, share_of(state, Part(1, 2)), Part(1, 2))
    own = Checkpoint(step=4, version=4, backend=share_of(state, Part(0, 2)))
    with pytest.raises(PublishError, match=r"rank 1: .*older checkpoints are untouched"):
        checkpoint.complete(
            temporary, own, Files(model_folder=tiny_model, keep=2, attempt=1, ranks=2)
        )
    assert load_latest(folder) is None


def test_a_rank_that_cannot_write_all_leaves_room_for_its_note(state, tmp_path):
    (tmp_path / "optimizer-00002-of-00002.safetensors").mkdir()  # the second file is refused
    write_share(tmp_path, share_of(state, Part(1, 2)), Part(1, 2))
    assert not (tmp_path / "model-00002-of-00002.safetensors").exists()
    assert "rank 1" in (tmp_path / "share-00001.json").read_text()


def test_a_rank_that_never_writes_is_named_when_the_wait_ends(state, tiny_model, tmp_path):
    with pytest.raises(PublishError, match=r"rank 2 has not written its share"):
        save_in_shares(tmp_path / "c", state, tiny_model, writes=(1,), limit_s=0.1)


def test_a_disk_that_hangs_holds_neither_the_trainer_nor_the_end_of_its_process(tmp_path):
    os.mkfifo(tmp_path / "hangs")  # which opens when somebody reads it: nobody does
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl.training.shares import ShareWriter\n"
        "for asks in (False, True):\n"
        "    with ShareWriter(0.1) as writer:\n"
        "        writer.begin(lambda: Path(sys.argv[1]).write_text('a checkpoint'))\n"
        "        writer.end(0.1) if asks else print('not waited for')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "hangs")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "not waited for\n")
    assert "not written after 0.1 s; its disk is slow or stuck" in done.stderr


def test_what_is_written_in_the_background_is_the_state_at_its_step(tiny_config):
    tiny_config.training.checkpoint_in_background = True
    tiny_config.training.checkpoint_every = 1
    fill_spool(tiny_config, range(6))
    train(tiny_config, attempt=1, stop=lambda: False, events=ev.NoEvents())
    saved = load_model(tiny_config.run_dir / "checkpoints" / "step-000002")
    published = dict(load_model(tiny_config.run_dir / "weights" / "v000002").named_parameters())
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, published[name])
