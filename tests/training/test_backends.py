"""Which back end is taken, and what is refused with words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from fabricate import fill_spool

from agentrl.config_checks import check
from agentrl.config_training import check_training
from agentrl.errors import ConfigError, LaunchError, RecordError
from agentrl.events import NoEvents
from agentrl.hf_shape import read_config
from agentrl.model_fit import check_fit, require_megatron
from agentrl.training.backends import open_backend
from agentrl.training.intake import Intake
from agentrl.training.packing import pack_step
from agentrl.training.ranks import ALONE
from agentrl.training.taken import Taken, as_tensors, digest, reread
from agentrl.training.torch_backend import TorchBackend


def test_torch_is_what_a_run_trains_with_unless_it_says_otherwise(tiny_config):
    assert isinstance(open_backend(tiny_config, ALONE), TorchBackend)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="it is installed")
def test_megatron_that_is_not_installed_is_refused_with_the_command(tiny_config):
    tiny_config.training.backend = "megatron"
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'megatron-core>=0\.16\.1"):
        open_backend(tiny_config, ALONE)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="it is not installed")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 3}, "tp=3 does not divide the model's 4 attention heads"),
        ({"tensor_parallel": 4}, "tp=4 does not divide the model's 2 key-value heads"),
        ({"expert_parallel": 2}, "ep=2: qwen3 has no experts"),
        ({"pipeline_parallel": 4}, "pp=4 does not divide the model's 2 layers"),
    ],
)
def test_a_cut_that_the_model_does_not_have_is_refused_before_megatron_is_imported(
    tiny_config, changes, words
):
    tiny_config.training = dataclasses.replace(tiny_config.training, backend="megatron", **changes)
    with pytest.raises(ConfigError, match=words):
        open_backend(tiny_config, ALONE)


@pytest.mark.parametrize("found", ["0.16.0", "0.20.0", "1.0"])
def test_a_megatron_of_another_time_is_refused(tmp_path, tiny_config, monkeypatch, found):
    folder = tmp_path / f"megatron_core-{found}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: megatron-core\nVersion: {found}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"megatron-core {found} is installed"):
        require_megatron(tiny_config.training)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel=2 with training.backend=torch"),
        ({"context_parallel": 0}, "must be 1 or more"),
        ({"backend": "megatron", "context_parallel": 2}, "raise training.tensor_parallel"),
        (
            {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "ranks": 2},
            r"tensor_parallel=2 times training\.pipeline_parallel=2 does not divide",
        ),
        (
            {"backend": "megatron", "expert_parallel": 4, "pipeline_parallel": 2, "ranks": 4},
            r"expert_parallel=4 times training\.pipeline_parallel=2 does not divide",
        ),
        ({"backend": "megatron", "tensor_parallel": 2, "ranks": 3}, "does not divide"),
        ({"backend": "megatron", "kl_coef": 0.1}, "keeps no starting model"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "holds nothing back; set k2 or k3"),
        ({"compile": True, "recompute": "layers"}, "set compile=false or recompute=none"),
        ({"backend": "megatron", "compile": True}, "are not compiled"),
        ({"backend": "megatron"}, "computes on GPUs only"),
    ],
)
def test_a_cut_that_cannot_be_made_says_what_to_set(tiny_config, changes, words):
    with pytest.raises(ConfigError, match=words):
        check_training(dataclasses.replace(tiny_config.training, **changes))


def test_experts_that_the_trainer_would_not_replay_are_not_asked_for(tiny_config):
    tiny_config.engine.sglang.routed_experts = True
    with pytest.raises(ConfigError, match=r"routed_experts=true with engine.kind=embedded"):
        check(tiny_config)
    tiny_config.engine.kind, tiny_config.training.device = "sglang", "gpu"
    check(tiny_config)
    tiny_config.engine.sglang.hierarchical_cache_gb = 8
    with pytest.raises(ConfigError, match=r"hierarchical_cache_gb=8: .*has another; set one"):
        check(tiny_config)
    tiny_config.engine.sglang.hierarchical_cache_gb = 0
    tiny_config.training.compile = True
    with pytest.raises(ConfigError, match=r"training.compile=true: .*set one of them false"):
        check(tiny_config)
    tiny_config.training.compile = False
    tiny_config.training.backend, tiny_config.training.megatron_layers = "megatron", "te"
    with pytest.raises(ConfigError, match=r"with training.megatron_layers=te: .*=local, or false"):
        check(tiny_config)


def take(config):
    """Return what rank 0 would tell the others of its first step."""
    fill_spool(config, range(2))
    batch = Intake(config=config, consumed={}, events=NoEvents()).wait(0, lambda: False, print)
    batches = pack_step(batch.samples, config.training)
    taken = Taken(draws=tuple(batch.outcome), nodes=batch.nodes, version=0)
    return batches, as_tensors(taken, batches)


def test_another_rank_reads_the_very_step_from_the_spool(tiny_config):
    batches, told = take(tiny_config)
    again = reread(told, tiny_config)
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in batches]
    assert [one.weights.tolist() for one in again] == [one.weights.tolist() for one in batches]


def test_a_rank_that_reads_something_else_says_so(tiny_config):
    _, told = take(tiny_config)
    tiny_config.training.std_normalize = False
    with pytest.raises(LaunchError, match=r"draws \[0, 1\].*not, for this rank"):
        reread(told, tiny_config)


@pytest.mark.parametrize("name", ["targets", "weights", "places", "ends"])
def test_whatever_the_loss_is_computed_from_is_in_the_checksum(tiny_config, name):
    tiny_config.training.packing = "packed"
    [first, *rest], _ = take(tiny_config)
    other = dataclasses.replace(first, **{name: getattr(first, name) + 1})
    assert digest([other, *rest]) != digest([first, *rest])


def test_a_file_that_was_torn_or_written_again_since_rank_0_read_it_is_not_trained(tiny_config):
    _, told = take(tiny_config)
    path = tiny_config.run_dir / "spool" / "0" / "00000001.parquet"
    fill_spool(tiny_config, range(1, 2), rewards=(0, 1, 1, 0))
    with pytest.raises(LaunchError, match="changed while the step began"):
        reread(told, tiny_config)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match=r"00000001\.parquet"):
        reread(told, tiny_config)


def test_a_rank_that_does_not_see_the_spool_says_so(tiny_config):
    _, told = take(tiny_config)
    tiny_config.name = "elsewhere"
    with pytest.raises(LaunchError, match="must see one filesystem"):
        reread(told, tiny_config)


@pytest.mark.parametrize(
    ("changes", "told", "words"),
    [
        ({"backend": "megatron"}, {"hidden_act": "gelu"}, "hidden_act='gelu' .*: it knows silu"),
        (
            {"backend": "megatron"},
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_type='dynamic' .*: it knows default, linear, llama3, yarn; .*backend=torch",
        ),
        (
            {"backend": "megatron"},
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            "a sliding window of 9 .*; set training.backend=torch",
        ),
        (
            {"packing": "packed"},
            {"use_sliding_window": True, "sliding_window": 9},
            "packing=packed: .* sliding window of 9, .*; set padded",
        ),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(
    tiny_config, tmp_path, changes, told, words
):
    tiny_config.training = dataclasses.replace(tiny_config.training, **changes)
    plain = read_config(Path(tiny_config.model.path))
    tiny_config.model.path, path = str(tmp_path), tmp_path / "config.json"
    for same in ({}, {"hidden_act": "silu"}, {"use_sliding_window": False, "sliding_window": 9}):
        path.write_text(json.dumps(plain | {"layer_types": None} | same))
        check_fit(tiny_config)
    path.write_text(json.dumps(plain | told))
    with pytest.raises(ConfigError, match=words):
        check_fit(tiny_config)
