"""What the trainer's ranks hold of a model, told from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from agentrl.config import ModelConfig, RunConfig, TrainingConfig, save
from agentrl.errors import ConfigError
from agentrl.hf_shape import Layout, read_shape
from agentrl.model_fit import check_fit, memory_line, trainer_memory
from agentrl.training.trainer_memory import held
from launch.cli import main

QWEN3_30B_A3B = {
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "tie_word_embeddings": False,
}
QWEN3_SMALL = {**LLAMA_8B, "head_dim": 128, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("Qwen3Moe", QWEN3_30B_A3B), ("Llama", LLAMA_8B), ("Qwen3", QWEN3_SMALL)],
)
def test_parameters_are_as_many_as_transformers_makes(kind: str, sizes: dict[str, object]) -> None:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    found = held(read_shape(config.to_dict()), Layout(), TrainingConfig())
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.rank_bytes == 16 * found.parameters  # float32: weight, gradient, two moments


def run_of(folder: Path, gpu_gb: int, **cut: int) -> RunConfig:
    told = QWEN3_30B_A3B | {"model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(told))
    training = TrainingConfig(device="gpu", dtype="bfloat16", ranks=8)
    if cut:
        training = replace(training, backend="megatron", **cut)
    config = RunConfig(model=ModelConfig(path=str(folder)), training=training)
    config.cluster.name, config.cluster.trainer.gpu_gb = "mine", gpu_gb
    return config


def test_a_model_that_the_trainers_gpus_cannot_hold_is_refused(tmp_path: Path) -> None:
    cut = {"expert_parallel": 8}
    check_fit(run_of(tmp_path, 96, **cut))
    check_fit(run_of(tmp_path, 0, **cut))  # not known
    check_fit(run_of(tmp_path, 64))  # FSDP2: 56.9 GiB
    with pytest.raises(ConfigError, match=r"expert_parallel=8, .* holds 71.5 GiB .*gpu_gb=64;"):
        check_fit(run_of(tmp_path, 64, **cut))


def test_plan_tells_what_a_gpu_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_of(tmp_path, 288, expert_parallel=8, tensor_parallel=2)
    line = memory_line(config, trainer_memory(config))
    assert "tensor_parallel=2, expert_parallel=8, pipeline_parallel=1: 67.3 GiB of 288 on" in line
    assert "of 30.5 B parameters" in line
    alone = run_of(tmp_path, 0)
    assert "training.backend=torch, ranks=8: 56.9 GiB on each GPU" in memory_line(
        alone, trainer_memory(alone)
    )
    alone.training.device = "cpu"
    assert memory_line(alone, trainer_memory(alone)) == ""
    save(run_of(tmp_path, 48), tmp_path / "run.yaml")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 1
    *_, told, over = capsys.readouterr().out.splitlines()
    assert "56.9 GiB of 48 on each GPU" in told
    assert "a rank holds 56.9 GiB" in over
