from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fabricate import make_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.config import TrainingConfig
from agentrl.errors import CheckpointError, ConfigError, DivergedError
from agentrl.training.backend import learning_rate
from agentrl.training.intake import make_batch
from agentrl.training.model_folder import load_model, named_weights, write_model_folder
from agentrl.training.packing import Sample, pack, stack
from agentrl.training.torch_backend import TorchBackend


def samples(config, draws=(0, 1)):
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in draws]
    return make_batch(groups, 0, config, Counter()).samples


def parameters(backend) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in backend.export_hf()])


@pytest.fixture
def backend(tiny_model, tiny_config):
    return TorchBackend(tiny_model, tiny_config)


def test_logprobs_equal_a_plain_transformers_forward(tiny_model, tiny_config):
    tiny_config.agent.temperature = 0.7
    batch = stack(samples(tiny_config))
    found = TorchBackend(tiny_model, tiny_config).logprobs(batch)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for sample in samples(tiny_config):
        ids = torch.tensor(sample.tokens, dtype=torch.int64)
        with torch.no_grad():
            log_p = torch.log_softmax(plain(ids.unsqueeze(0)).logits[0] / 0.7, -1)
        positions = [t for t in range(1, len(ids)) if sample.loss_mask[t]]
        expected += [float(log_p[t - 1, ids[t]]) for t in positions]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    budget=st.integers(30, 600),
    aggregation=st.sampled_from(["token", "trajectory"]),
    packing=st.sampled_from(["padded", "packed"]),
    ranks=st.integers(1, 3),
)
def test_how_a_step_is_split_into_micro_batches_changes_nothing(
    tiny_model, tiny_config, budget, aggregation, packing, ranks
):
    tiny_config.training.aggregation, tiny_config.training.packing = aggregation, "padded"
    items = samples(tiny_config)
    whole = TorchBackend(tiny_model, tiny_config)
    tiny_config.training.packing = packing
    split = TorchBackend(tiny_model, tiny_config)
    one = whole.train_step([stack(items)])
    many = split.train_step(pack(items, budget, is_packed=packing == "packed", ranks=ranks))
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    for (name, a), (_, b) in zip(
        whole.model.named_parameters(), split.model.named_parameters(), strict=True
    ):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name


def test_steps_raise_the_chance_of_the_rewarded_tokens(backend, tiny_config):
    items = samples(tiny_config)
    batch = stack(items)
    before = backend.logprobs(batch)
    for _ in range(5):
        backend.train_step([batch])
    gained = backend.logprobs(batch) - before
    assert float(gained[batch.advantages > 0].mean()) > float(gained[batch.advantages < 0].mean())


def test_the_gap_is_zero_and_ess_one_when_the_engine_agrees(backend, tiny_config):
    batch = stack(samples(tiny_config))
    batch = dataclasses.replace(batch, engine_logprobs=backend.logprobs(batch))
    metrics = backend.train_step([batch])
    assert metrics["gap"] < 1e-6
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["capped"] == metrics["clip_fraction"] == 0.0


def test_the_learning_rate_rises_then_stays(backend, tiny_config):
    batch = stack(samples(tiny_config))
    rates = [backend.train_step([batch])["lr"] for _ in range(4)]
    assert rates == pytest.approx([1.5e-4, 3e-4, 3e-4, 3e-4])


def test_kl_and_entropy_terms_enter_the_loss(tiny_model, tiny_config):
    batch = stack(samples(tiny_config))
    plain = TorchBackend(tiny_model, tiny_config).train_step([batch])
    tiny_config.training.kl_coef = 0.1
    tiny_config.training.entropy_coef = 0.01
    with_terms = TorchBackend(tiny_model, tiny_config).train_step([batch])
    assert with_terms["kl"] == pytest.approx(0.0, abs=1e-6)
    assert with_terms["loss"] == pytest.approx(plain["loss"] - 0.01 * plain["entropy"], abs=1e-5)


def test_a_loss_that_is_no_number_changes_no_weight(backend, tiny_config):
    before = parameters(backend).clone()
    batch = stack(samples(tiny_config))
    batch.weights[0] = float("nan")
    with pytest.raises(DivergedError, match="weights are unchanged"):
        backend.train_step([batch])
    assert torch.equal(parameters(backend), before)


def test_a_restored_back_end_goes_on_bit_for_bit(tiny_model, tiny_config):
    batches = pack(samples(tiny_config), 200)
    first = TorchBackend(tiny_model, tiny_config)
    first.train_step(batches)
    second = TorchBackend(tiny_model, tiny_config)
    second.restore(first.state())
    first.train_step(batches)
    second.train_step(batches)
    assert torch.equal(parameters(first), parameters(second))


def test_a_checkpoint_of_another_model_is_refused(backend):
    state = backend.state()
    other = dataclasses.replace(state, model={"another.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="of another model"):
        backend.restore(other)


def test_a_checkpoint_tensor_of_another_shape_is_named_with_both(backend):
    state = backend.state()
    narrow = {**state.model, "model.norm.weight": torch.ones(8)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[8\] .* and \[32\] in"):
        backend.restore(dataclasses.replace(state, model=narrow))


def test_an_optimizer_state_of_another_program_is_refused(backend, tiny_config):
    backend.train_step([stack(samples(tiny_config))])
    state = backend.state()
    other = {"momentum/model.norm.weight": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"state has momentum.*another program"):
        backend.restore(dataclasses.replace(state, optimizer=state.optimizer | other))


def test_an_optimizer_state_of_which_a_part_is_lost_is_refused(backend, tiny_config):
    backend.train_step([stack(samples(tiny_config))])
    state = backend.state()
    kept = {name: one for name, one in state.optimizer.items() if not name.startswith("exp_avg_sq")}
    with pytest.raises(CheckpointError, match=r"state has no exp_avg_sq"):
        backend.restore(dataclasses.replace(state, optimizer=kept))


def test_exported_weights_load_as_a_transformers_model(backend, tiny_config, tmp_path):
    backend.train_step([stack(samples(tiny_config))])
    write_model_folder(tmp_path / "out", backend.export_hf(), Path(tiny_config.model.path))
    again = dict(named_weights(load_model(tmp_path / "out")))
    assert all(torch.equal(tensor, again[name]) for name, tensor in backend.export_hf())
    assert "lm_head.weight" not in again  # tied: counted once


def test_bfloat16_is_for_the_engines_and_masters_stay_float32(tiny_model, tiny_config):
    tiny_config.training.dtype = "bfloat16"
    backend = TorchBackend(tiny_model, tiny_config)
    assert {tensor.dtype for _, tensor in backend.export_hf()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in backend.state().model.values()} == {torch.float32}


def test_a_folder_without_a_model_is_named(tmp_path, tiny_config):
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        TorchBackend(tmp_path, tiny_config)


def rewritten(folder, tmp_path, change):
    """Copy a model folder, its tensors changed."""
    shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "changed"


def test_a_tensor_that_is_missing_is_never_made_up(tiny_model, tiny_config, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = rewritten(tiny_model, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        TorchBackend(folder, tiny_config)


def test_a_tensor_of_another_shape_is_named_with_both(tiny_model, tiny_config, tmp_path):
    wrong = {"model.norm.weight": torch.ones(8)}
    folder = rewritten(tiny_model, tmp_path, lambda tensors: tensors.update(wrong))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \[8\] in .* and \[32\] by"):
        TorchBackend(folder, tiny_config)


def test_a_sample_without_sampled_tokens_does_no_harm(backend):
    empty = Sample(
        tokens=np.ones(4, dtype=np.int32),
        loss_mask=np.zeros(4, dtype=np.bool_),
        engine_logprobs=np.zeros(4, dtype=np.float32),
        advantage=1.0,
    )
    before = parameters(backend).clone()
    backend.train_step([stack([empty])])
    assert torch.equal(parameters(backend), before)


# The learning rate


def schedule(decay: str) -> list[float]:
    config = TrainingConfig(steps=10, lr=1.0, warmup_steps=4, lr_decay=decay)
    return [round(learning_rate(config, update), 3) for update in range(12)]


def test_the_learning_rate_rises_and_stays() -> None:
    assert schedule("none") == [0.25, 0.5, 0.75, *[1.0] * 9]


def test_a_linear_decay_ends_at_nothing_and_never_below() -> None:
    falling = [0.833, 0.667, 0.5, 0.333, 0.167]
    assert schedule("linear") == [0.25, 0.5, 0.75, 1.0, 1.0, *falling, 0.0, 0.0]
