"""Routing replay in the plain torch back end, against a mixture written by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from fabricate import make_config, make_experts, make_group
from megatron_ranks import make_family
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.events import EventWriter, NoEvents, Step, read_folder
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group
from agentrl.training import ranks
from agentrl.training.intake import Intake, make_batch
from agentrl.training.loop import train
from agentrl.training.packing import Sample, deal, join, pack, stack
from agentrl.training.taken import digest
from agentrl.training.torch_backend import TorchBackend

LAYERS, EXPERTS, EACH = 2, 4, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(params=[True, False], ids=["over a token's experts", "over all experts"])
def either(request, mixture, tmp_path):
    """Mixtures whose chances add up to 1 over the experts of a token, and over all."""
    folder = shutil.copytree(mixture, tmp_path / "either")
    told = json.loads((folder / "config.json").read_text()) | {"norm_topk_prob": request.param}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def config(tmp_path, mixture):
    made = make_config(tmp_path, mixture)
    made.engine.kind, made.engine.sglang.routed_experts = "sglang", True
    return made


def routes(tokens: int, seed: int = 0) -> np.ndarray:
    return make_experts(tokens, layers=LAYERS, count=EXPERTS, seed=seed)


def samples(config, chosen=routes) -> list[Sample]:
    """Return a step's samples; `chosen` makes experts of a number of tokens."""
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    plain = make_batch(groups, 0, config, Counter()).samples
    return [dataclasses.replace(one, experts=chosen(len(one.tokens))) for one in plain]


class ByHand(nn.Module):
    """Qwen3-MoE's block with experts that are given: a sum over a token's, one at a time."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.chosen = block, None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, experts = self.block.gate, self.block.experts
        out = []
        for state, chosen in zip(hidden.flatten(0, 1), self.chosen, strict=True):
            chances = torch.softmax(gate.weight @ state, -1)[chosen]
            if gate.norm_topk_prob:
                chances = chances / chances.sum()
            both = [experts.gate_up_proj[one] @ state for one in chosen]
            inner = [nn.functional.silu(a) * b for a, b in (one.chunk(2) for one in both)]
            parts = [experts.down_proj[one] @ mid for one, mid in zip(chosen, inner, strict=True)]
            out.append(sum(p * part for p, part in zip(chances, parts, strict=True)))
        return torch.stack(out).view(hidden.shape)


def by_hand(folder) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp = ByHand(layer.mlp)
    return model


def wanted_logprobs(model: nn.Module, items: list[Sample]) -> torch.Tensor:
    found = []
    for one in items:
        for number, layer in enumerate(model.model.layers):
            layer.mlp.chosen = torch.from_numpy(one.experts[:, number].astype(np.int64))
        ids = torch.tensor(one.tokens, dtype=torch.int64)
        log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
        places = [place for place in range(1, len(ids)) if one.loss_mask[place]]
        found.append(log_p[[place - 1 for place in places], ids[places]])
    return torch.cat(found)


def test_forced_experts_give_the_log_probabilities_of_a_mixture_by_hand(either, config):
    items = samples(config)
    found = TorchBackend(either, config).logprobs(join(items))
    with torch.no_grad():
        wanted = wanted_logprobs(by_hand(either), items)
    own = TorchBackend(either, config).logprobs(join(samples(config, lambda _: None)))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert float((found - own).abs().max()) > 1e-2


def test_gradients_of_forced_experts_are_those_of_a_mixture_by_hand(either, config):
    config.training.max_grad_norm, config.training.importance_cap = 1e9, 0.0
    batch = stack(items := samples(config))
    backend, model = TorchBackend(either, config), by_hand(either)
    backend.train_step([batch])
    # at ratio 1 the surrogate's gradient is that of − advantage · log-probability
    weights = torch.cat(
        [torch.full((one.sampled_tokens,), -one.advantage * one.weight) for one in items]
    )
    (wanted_logprobs(model, items) * weights).sum().backward()
    wanted = {name.replace("mlp.block", "mlp"): one.grad for name, one in model.named_parameters()}
    for name, parameter in backend.model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], atol=1e-6), name
    assert all(one.abs().max() > 1e-5 for name, one in wanted.items() if "gate.weight" in name)


def own_routes(mixture, config) -> list[Sample]:
    """Return samples with the experts that the model itself chooses."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    items, found = samples(config), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *call: found.append(call[2][2]))
    chosen = []
    for one in items:
        found.clear()
        with torch.no_grad():
            model(torch.tensor(one.tokens, dtype=torch.int64)[None])
        chosen.append(torch.stack(found, 1).numpy().astype(np.uint8))
    pairs = zip(items, chosen, strict=True)
    return [dataclasses.replace(one, experts=experts) for one, experts in pairs]


@pytest.mark.parametrize("lay", [stack, join])
def test_replaying_the_routers_own_choice_changes_nothing(mixture, config, lay):
    items = own_routes(mixture, config)
    plain = lay([dataclasses.replace(one, experts=None) for one in items])
    backend = TorchBackend(mixture, config)
    assert torch.allclose(backend.logprobs(lay(items)), backend.logprobs(plain), atol=1e-6)
    assert backend.train_step([lay(items)])["rerouted"] == 0.0


@pytest.mark.parametrize("lay", [stack, join])
def test_experts_of_a_model_with_many_are_wider_numbers_for_the_same(mixture, config, lay):
    items = samples(config)
    wide = [dataclasses.replace(one, experts=one.experts.astype(np.uint16)) for one in items]
    narrow, other = lay(items), lay(wide)
    assert (narrow.experts.dtype, other.experts.dtype) == (torch.uint8, torch.int16)
    backend = TorchBackend(mixture, config)
    assert torch.equal(backend.logprobs(narrow), backend.logprobs(other))


def step(mixture, config, **changes) -> tuple[dict[str, float], torch.Tensor]:
    changed = dataclasses.replace(config.training, **changes)
    backend = TorchBackend(mixture, dataclasses.replace(config, training=changed))
    batches = pack(samples(config), 80, is_packed=changed.packing == "packed")
    metrics = backend.train_step(batches)
    return metrics, torch.cat([one.grad.flatten() for one in backend.model.parameters()])


@pytest.mark.parametrize(
    "changes",
    [{"packing": "packed"}, {"recompute": "layers"}, {"recompute": "layers", "packing": "packed"}],
    ids=str,
)
def test_neither_packing_nor_recompute_changes_a_replayed_step(mixture, config, changes):
    metrics, wanted = step(mixture, config)
    found, gradients = step(mixture, config, **changes)
    assert found == pytest.approx(metrics, abs=1e-5)
    assert torch.allclose(gradients, wanted, atol=1e-6)


def test_rerouted_is_the_share_of_choices_that_the_router_would_not_have_made(mixture, config):
    items = own_routes(mixture, config)
    for chosen in items[0].experts:  # in the last layer, so that no router sees another state
        chosen[-1, 0] = next(one for one in range(EXPERTS) if one not in chosen[-1])
    metrics = TorchBackend(mixture, config).train_step(pack(items, 60))
    total = sum(one.experts.size for one in items)
    assert metrics["rerouted"] == pytest.approx(len(items[0].tokens) / total)


def test_a_batch_without_experts_goes_as_the_routers_choose(mixture, config):
    plain = samples(config, lambda _: None)
    replaying = TorchBackend(mixture, config)
    replaying.logprobs(join(samples(config)))  # what was told once does not last
    config.engine.sglang.routed_experts = False
    wanted = TorchBackend(mixture, config).logprobs(join(plain))
    assert torch.equal(replaying.logprobs(join(plain)), wanted)
    assert "rerouted" not in replaying.train_step([join(plain)])


def test_ranks_are_told_experts_and_compare_them(config):
    batches = pack(samples(config), 60, is_packed=True)
    told = ranks.from_tensors(ranks.to_tensors([batches]), 0)
    assert all(torch.equal(a.experts, b.experts) for a, b in zip(told, batches, strict=True))
    assert all(hand[-1].experts is None for hand in deal(batches[:1], 2)[1:])
    others = pack(samples(config, lambda size: routes(size, 1)), 60, is_packed=True)
    assert digest(told) == digest(batches) != digest(others)


def test_samples_some_of_which_have_no_experts_are_no_batch(config):
    first, second, *_ = samples(config)
    with pytest.raises(ValueError, match="1 of 2 samples have experts"):
        stack([first, dataclasses.replace(second, experts=None)])


def group(draw: int, first: np.ndarray | None = None) -> Group:
    """Return a group with experts; `first` are those of its first trajectory."""
    made = make_group(draw, [1, 0, 0, 1, None])
    chosen = [routes(len(one.tokens)) for one in made.trajectories[:-1]]
    chosen[0] = chosen[0] if first is None else first
    graded = [
        dataclasses.replace(row, experts=experts)
        for row, experts in zip(made.trajectories[:-1], chosen, strict=True)
    ]
    return dataclasses.replace(made, trajectories=(*graded, made.trajectories[-1]))


def test_a_group_whose_experts_are_missing_or_of_another_model_is_filtered(config, events):
    length = {draw: len(make_group(draw, [1]).trajectories[0].tokens) for draw in range(5)}
    writer = SpoolWriter(config.run_dir / "spool", 0)
    for made in (
        *(group(0), group(8)),
        group(1, np.empty((0, 0, 0), np.uint8)),
        group(2, routes(length[2])[:, :1]),
        group(3, routes(length[3])[:, :, :1]),
        group(4, routes(length[4]) + np.uint8(EXPERTS)),
    ):
        writer.write(made)
    intake = Intake(config=config, consumed={}, events=events)
    batch = intake.wait(0, lambda: False, lambda: None)
    assert sorted(batch.outcome) == [0, 8]
    assert intake.counted() == {
        "filtered_no_experts": 1,
        "filtered_wrong_experts": 3,
        "infra_sandbox_lost": 2,
    }
    assert all(one.experts.shape == (len(one.tokens), LAYERS, EACH) for one in batch.samples)


@pytest.fixture
def events(tmp_path):
    writer = EventWriter(tmp_path / "events", "trainer")
    yield writer
    writer.close()


def test_a_run_takes_replayed_steps_and_says_what_replay_changed(config, events, tmp_path):
    config.training.steps = 1
    writer = SpoolWriter(config.run_dir / "spool", 0)
    for draw in range(2):
        writer.write(group(draw))
    assert train(config, attempt=1, stop=lambda: False, events=events) == 0
    told = read_folder(tmp_path / "events")
    (metrics,) = [one.metrics for one in told if isinstance(one, Step)]
    assert 0.1 < metrics["rerouted"] < 0.9


def test_replay_of_a_dense_model_is_refused_before_a_step(tiny_config):
    tiny_config.engine.sglang.routed_experts = True
    with pytest.raises(ConfigError, match="is a qwen3 without experts; set false"):
        train(tiny_config, attempt=1, stop=lambda: False, events=NoEvents())


def test_a_model_without_routers_that_are_known_is_refused(tiny_model, tiny_config):
    tiny_config.engine.sglang.routed_experts = True
    with pytest.raises(ConfigError, match="has no Qwen3MoeTopKRouter"):
        TorchBackend(tiny_model, tiny_config)
