from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fabricate import make_group, run_ranks, with_experts
from megatron_ranks import make_family
from processes import children

from agentrl.config import to_yaml
from agentrl.errors import ConfigError, LaunchError
from agentrl.training import checkpoint, ranks
from agentrl.training.checkpoint import Checkpoint, Files, load_latest
from agentrl.training.intake import make_batch
from agentrl.training.packing import deal, pack
from agentrl.training.torch_backend import TorchBackend


def samples(config):
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    found = make_batch(groups, 0, config, Counter()).samples
    return with_experts(found) if config.engine.sglang.routed_experts else found


def batches_of(config):
    is_packed = config.training.packing == "packed"
    balances = config.training.router_balance_coef > 0
    size = config.training.ranks
    return pack(samples(config), 60, is_packed=is_packed, ranks=size, balances=balances)


def learn(model, config):
    """Return log-probabilities before two steps, the last one's metrics, state and export."""
    batches = batches_of(config)
    with ranks.started(config) as world:
        backend = TorchBackend(model, config, world=world)
        before = [backend.logprobs(batch) for batch in batches]
        for _ in range(2):
            metrics = backend.train_step(batches)
        exported = dict(backend.export_hf())
        return torch.cat(before), metrics, backend.state(), exported, backend.gaps


def assert_same(mine, other):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packing", ["padded", "packed, experts replayed and balanced"])
def test_two_ranks_do_what_one_does(tiny_model, tiny_config, packing, tmp_path):
    tiny_config.training.packing, _, replays = packing.partition(",")
    if replays:
        tiny_model = make_family(tmp_path / "mixture", "qwen3_moe")
        tiny_config.model.path = str(tiny_model)
        tiny_config.engine.kind, tiny_config.engine.sglang.routed_experts = "sglang", True
        tiny_config.training.router_balance_coef = 0.5
    tiny_config.training.recompute = "layers"
    tiny_config.training.head_tiles_from = 2
    tiny_config.training.kl_coef = 0.1
    tiny_config.training.lr = 1e-4
    alone = learn(tiny_model, tiny_config)
    tiny_config.training.ranks = 2
    together = learn(tiny_model, tiny_config)
    assert together[0].sort().values == pytest.approx(alone[0].sort().values, abs=1e-5)
    assert together[1] == pytest.approx(alone[1], abs=1e-5, rel=1e-4)
    assert (alone[1].get("rerouted", 0.0) > 0.1) == bool(replays)
    assert (alone[1].get("router_balance", 0.0) > 1) == bool(replays)
    assert_same(together[2].model, alone[2].model)
    assert_same(together[3], alone[3])
    assert together[4] == pytest.approx(alone[4], abs=1e-4)


def saved(folder, backend, model):
    """Return what two ranks wrote, each its share, as a resumed trainer reads it."""
    temporary = checkpoint.begin(folder, backend.updates, 1)
    state = Checkpoint(
        step=backend.updates, version=backend.updates, backend=backend.share(temporary)
    )
    files = Files(model_folder=model, keep=1, attempt=1, ranks=2, limit_s=300)
    path = checkpoint.complete(temporary, state, files)
    assert len(list(path.glob("optimizer-*-of-00002.safetensors"))) == 2
    return load_latest(folder).backend


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_two_ranks_saved_one_goes_on_with_and_the_other_way_round(
    tiny_model, tiny_config, tmp_path
):
    alone = TorchBackend(tiny_model, tiny_config)
    tiny_config.training.ranks = 2
    batches = batches_of(tiny_config)
    alone.train_step(batches)
    with ranks.started(tiny_config) as world:
        together = TorchBackend(tiny_model, tiny_config, world=world)
        together.restore(alone.state())
        for backend in (alone, together):
            backend.train_step(batches)
        assert_same(together.state().model, alone.state().model)
        alone.restore(saved(tmp_path / "checkpoints", together, tiny_model))
        for backend in (alone, together):
            backend.train_step(batches)
        assert together.updates == alone.updates == 3
        assert_same(together.state().optimizer, alone.state().optimizer)


FOLLOWER = "agentrl.training.follower"


def step_with_the_dead(model, config) -> None:
    batches = batches_of(config)
    with ranks.started(config) as world:
        backend = TorchBackend(model, config, world=world)
        backend.train_step(batches)
        children(having=FOLLOWER)[0].kill()
        backend.train_step(batches)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rank_that_is_killed_ends_the_step_at_once_and_nobody_is_left(tiny_model, tiny_config):
    tiny_config.training.ranks = 2
    with pytest.raises(LaunchError, match=r"trainer rank 1 ended with -9; "):
        step_with_the_dead(tiny_model, tiny_config)  # not after the longest wait, 45 minutes
    assert not children(having=FOLLOWER)
    assert not dist.is_initialized()


def test_a_rank_that_ends_before_it_has_come_is_named_at_once(tiny_config, monkeypatch):
    tiny_config.training.ranks = 3
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # as one whose imports fail
    with (
        pytest.raises(LaunchError, match=r"rank 1 ended with 1 before it took its place; its last"),
        ranks.started(tiny_config),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("free_mb", "needed_mb", "at_once"),
    [(512_000, 116_000, 4), (100_000, 116_000, 1), (3_000_000, 116_000, 8), (9, 0, 8)],
)
def test_as_many_ranks_load_at_once_as_memory_holds(free_mb, needed_mb, at_once):
    assert ranks.turns_of(free_mb, needed_mb, 8) == at_once


def take_turns(rank, size, root):
    control = dist.new_group(backend="gloo")
    world = ranks.World(rank=rank, size=size, control=control)
    for needed_mb in (0, 1 << 40):  # all at once, then one by one
        with world.by_turns(needed_mb):
            (Path(root) / f"{needed_mb} {rank} begins").touch()
            others = list(Path(root).glob(f"{needed_mb} * begins"))
            ended = list(Path(root).glob(f"{needed_mb} * ends"))
            if needed_mb:
                assert len(others) == rank + 1 == len(ended) + 1
            (Path(root) / f"{needed_mb} {rank} ends").touch()


@pytest.mark.slow
def test_ranks_that_lack_memory_load_one_after_the_other(tmp_path):
    run_ranks(tmp_path, "test_ranks:take_turns", 3, str(tmp_path))


HANGS = """
import sys, threading
import psutil
from agentrl.config import load
from agentrl.training import ranks

with ranks.started(load(sys.argv[1]), notice_s=0.5):
    for child in psutil.Process().children():
        child.kill()
    threading.Event().wait(120)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_does_not_notice_that_a_rank_is_gone_is_killed(tiny_config, tmp_path):
    tiny_config.training.ranks = 2
    (tmp_path / "run.yaml").write_text(to_yaml(tiny_config))
    command = [sys.executable, "-c", HANGS, tmp_path / "run.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "trainer rank 1 ended with -9, and rank 0 waits for it" in ended.stderr


@pytest.mark.parametrize("shares", [False, True])
def test_gpus_that_are_not_there_are_named(tiny_config, shares):
    tiny_config.training.device, tiny_config.training.share_gpus = "gpu", shares
    if torch.cuda.is_available():
        pytest.skip("there are some here")
    with pytest.raises(ConfigError, match="sees 0 GPUs here"), ranks.started(tiny_config):
        pass


def test_every_rank_gets_as_many_micro_batches_and_all_of_them(tiny_config):
    batches = batches_of(tiny_config)[:5]
    hands = deal(batches, 3)
    assert [len(hand) for hand in hands] == [2, 2, 2]
    dealt = [batch for hand in hands for batch in hand if batch.real_tokens]
    assert sorted(map(id, dealt)) == sorted(map(id, batches))


def test_micro_batches_are_told_without_a_change(tiny_config):
    tiny_config.training.packing = "packed"
    hands = deal(batches_of(tiny_config), 2)
    told = ranks.from_tensors(ranks.to_tensors(hands), 1)
    for mine, other in zip(told, hands[1], strict=True):
        assert torch.equal(mine.tokens, other.tokens)
        assert mine.ends is None or torch.equal(mine.ends, other.ends)
