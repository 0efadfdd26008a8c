"""Balancing of experts, against the formula written out and both ways of packing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fabricate import fill_spool, make_config, make_group, with_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_ranks import make_family
from transformers import AutoModelForCausalLM

from agentrl.config_training import check_training
from agentrl.errors import ConfigError
from agentrl.events import EventWriter, NoEvents, Step, read_folder
from agentrl.training.balance import Tally, balance_of, loss_and_gradient, metrics_of
from agentrl.training.intake import make_batch
from agentrl.training.loop import train
from agentrl.training.packing import Sample, deal, pack, pack_step
from agentrl.training.ranks import from_tensors, to_tensors
from agentrl.training.replay import routers_of
from agentrl.training.sft import opened
from agentrl.training.torch_backend import TorchBackend
from agentrl.training.traces import Trace

CPU = torch.device("cpu")
EXPERTS, EACH = 4, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture
def config(tmp_path, mixture):
    made = make_config(tmp_path, mixture)
    made.training.router_balance_coef, made.training.max_grad_norm = 0.5, 1e9
    return made


def samples(config) -> list[Sample]:
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    return make_batch(groups, 0, config, Counter()).samples


def sample(places) -> Sample:
    """Return a sequence whose tokens are their places in a table of logits."""
    return Sample(
        tokens=np.array(places, dtype=np.int32),
        loss_mask=np.ones(len(places), dtype=np.bool_),
        engine_logprobs=np.zeros(len(places), dtype=np.float32),
        advantage=1.0,
    )


# The arithmetic


def test_loss_and_gradient_of_two_sequences_are_those_worked_out_by_hand():
    # two experts, one a token; the first sequence sends 2 of 3 tokens to expert 0, the second all
    logits = torch.tensor(
        [[1.0, 0], [2, 0], [0, 1], [3, 0]], dtype=torch.float64, requires_grad=True
    )
    chances = torch.softmax(logits, -1)
    first = 2 / 3 * (2 * chances[:3, 0].mean() + 1 * chances[:3, 1].mean())
    second = 2 * chances[3, 0]
    wanted = 3 / 4 * first + 1 / 4 * second
    wanted.backward()
    rates = torch.tensor([[4 / 3, 2 / 3]] * 3 + [[2.0, 0]], dtype=torch.float64) / 4
    found, gradient = loss_and_gradient(logits.detach(), rates)
    torch.testing.assert_close(found, wanted.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-12, rtol=0)
    sums = told_of([sample([0, 1, 2]), sample([3])], 100, True, logits.float().detach(), each=1)
    assert metrics_of(sums[0])["router_balance"] == pytest.approx(wanted.item())
    assert metrics_of(sums[0])["busiest_expert"] == pytest.approx(3 / 2)
    torch.testing.assert_close(sums[1].double(), gradient, atol=1e-7, rtol=0)


def told_of(items, budget, is_packed, logits, *, each=EACH):
    """Return the tally and the logits' gradient of a step of `items`, in micro-batches."""
    tally = Tally(1, logits.shape[1], CPU)
    gradient = torch.zeros_like(logits)
    batches = pack(items, budget, is_packed=is_packed, balances=True)
    for batch in (one for hand in deal(batches, 2) for one in hand):
        balance = balance_of(batch, 1.0, tally)
        if balance is None:
            continue
        here = logits[batch.tokens.flatten()].requires_grad_()
        chosen = here.topk(each, 1).indices
        chances = here.gather(1, chosen).detach()
        balance.joined(chances.requires_grad_(), here, chosen, layer=0).sum().backward()
        real = batch.token_shares.flatten() > 0
        gradient.index_add_(0, batch.tokens.flatten()[real], here.grad[real])
        assert not here.grad[~real].any()
    return tally.taken(), gradient


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(10, 200),
    st.booleans(),
    st.integers(0, 99),
)
def test_how_a_step_is_packed_or_split_changes_nothing(sizes, budget, is_packed, seed):
    logits = torch.randn(sum(sizes), EXPERTS, generator=torch.Generator().manual_seed(seed))
    ends = np.cumsum(sizes)
    items = [sample(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    whole, wanted = told_of(items, 10_000, True, logits)
    found, gradient = told_of(items, budget, is_packed, logits)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=1e-5)


def test_even_experts_are_1_and_all_tokens_to_one_is_their_number_over_a_tokens():
    even = torch.zeros(4, EXPERTS) + 20 * torch.eye(EXPERTS)
    one = torch.tensor([[20.0, 0, 0, 0]] * 4)
    found = [metrics_of(told_of([sample(range(4))], 9, True, x, each=1)[0]) for x in (even, one)]
    assert list(found[0].values()) == pytest.approx([1, 1])
    assert list(found[1].values()) == pytest.approx([EXPERTS, EXPERTS])


def test_ranks_are_told_what_balances_and_one_without_tokens_is_told_nothing(config):
    hands = deal(pack_step(samples(config), config.training)[:1], 2)
    told = from_tensors(to_tensors(hands), 0)
    assert torch.equal(told[0].token_shares, hands[0][0].token_shares)
    assert balance_of(hands[1][0], 1.0, Tally(1, EXPERTS, CPU)) is None


# A step of the plain back end


def by_formula(folder, items) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of all layers of a step, and its gradients, by autograd."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[tuple[torch.Tensor, ...]] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *call: found.append(call[2]))
    total = sum(len(one.tokens) for one in items)
    loss = torch.zeros(())
    for one in items:
        found.clear()
        model(torch.from_numpy(one.tokens.astype(np.int64))[None])
        for logits, _, own in found:
            share = torch.bincount(own.flatten(), minlength=EXPERTS) / own.numel() * EXPERTS
            loss = loss + len(own) / total * (share * torch.softmax(logits, -1).mean(0)).sum()
    loss.backward()
    return loss, {name: one.grad for name, one in model.named_parameters()}


def gradients(mixture, config, **changes) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    changed = dataclasses.replace(config.training, **changes)
    backend = TorchBackend(mixture, dataclasses.replace(config, training=changed))
    metrics = backend.train_step(pack_step(samples(config), changed))
    named = backend.model.named_parameters()
    return metrics, {name: one.grad.clone() for name, one in named}


def test_a_steps_gradient_has_the_coefficient_times_the_formulas_more(mixture, config):
    plain, before = gradients(mixture, config, router_balance_coef=0.0)
    metrics, after = gradients(mixture, config)
    loss, more = by_formula(mixture, samples(config))
    assert metrics["router_balance"] == pytest.approx(loss.item() / 2, abs=1e-6)
    assert metrics["loss"] == plain["loss"]
    assert "router_balance" not in plain
    for name, wanted in before.items():
        added = torch.zeros_like(wanted) if more[name] is None else 0.5 * more[name]
        torch.testing.assert_close(after[name], wanted + added, atol=1e-6, rtol=1e-4)
    assert float(more["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": "packed"},
        {"recompute": "layers"},
        {"recompute": "layers", "packing": "packed", "micro_batch_tokens": 40},
    ],
    ids=str,
)
def test_neither_packing_nor_recompute_changes_a_balanced_step(mixture, config, changes):
    metrics, wanted = gradients(mixture, config)
    found, other = gradients(mixture, config, **changes)
    assert found == pytest.approx(metrics, abs=1e-5)
    for name, one in other.items():
        torch.testing.assert_close(one, wanted[name], atol=1e-6, rtol=1e-4)


def test_tokens_of_which_none_is_in_the_loss_are_balanced_too(mixture, config):
    one = samples(config)[0]
    silent = dataclasses.replace(one, loss_mask=np.zeros_like(one.loss_mask))
    backend = TorchBackend(mixture, config)
    metrics = backend.train_step(pack_step([silent], config.training))
    loss, more = by_formula(mixture, [silent])
    assert metrics["router_balance"] == pytest.approx(loss.item() / 2, abs=1e-6)
    gate = "model.layers.1.mlp.gate.weight"
    found = dict(backend.model.named_parameters())[gate].grad
    torch.testing.assert_close(found, 0.5 * more[gate], atol=1e-6, rtol=1e-4)


def test_with_replay_the_experts_that_were_taken_are_counted(mixture, config):
    config.engine.sglang.routed_experts = True
    items = with_experts(samples(config))
    for one in items:
        one.experts[:] = [0, 1]
    metrics = TorchBackend(mixture, config).train_step(pack_step(items, config.training))
    assert metrics["busiest_expert"] == pytest.approx(EXPERTS / EACH)
    config.engine.sglang.routed_experts = False
    own = TorchBackend(mixture, config).train_step(pack_step(items, config.training))
    assert own["busiest_expert"] < 1.9


def test_a_coefficient_of_0_touches_no_router_and_no_batch(mixture, config):
    config.training.router_balance_coef = 0.0
    backend = TorchBackend(mixture, config)
    assert not any(router._forward_hooks for router in routers_of(backend.model, ""))
    assert all(one.token_shares is None for one in pack_step(samples(config), config.training))


def test_some_steps_bring_the_experts_nearer_to_even(mixture, config):
    config.training.router_balance_coef, config.training.lr = 10.0, 3e-3
    backend = TorchBackend(mixture, config)
    batches = pack_step(samples(config), config.training)
    told = [backend.train_step(batches) for _ in range(12)]
    assert told[0]["router_balance"] - 1 > 4 * (told[-1]["router_balance"] - 1)
    assert told[0]["busiest_expert"] > told[-1]["busiest_expert"] + 0.05


def test_a_steps_event_tells_how_even_the_experts_are(config, tmp_path):
    config.training.steps = 1
    fill_spool(config, range(2))
    with closing(EventWriter(tmp_path / "events", "trainer")) as events:
        train(config, attempt=1, stop=lambda: False, events=events)
    (metrics,) = [one.metrics for one in read_folder(tmp_path / "events") if isinstance(one, Step)]
    assert 1 < metrics["router_balance"] < metrics["busiest_expert"] < EXPERTS / EACH


def test_fine_tuning_balances_on_one_cpu_process_as_well(config):
    rng = np.random.default_rng(0)
    traces = [
        Trace(tokens=rng.integers(0, 64, 20, dtype=np.int32), loss_mask=np.ones(20, np.bool_))
        for _ in range(8)
    ]
    with opened(config, traces) as learner:
        learner.take_step()
        assert learner.backend.balance is not None


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router_balance_coef": -0.1}, r"router_balance_coef=-0\.1: must be 0 or more"),
        ({"router_balance_coef": float("nan")}, "must be 0 or more"),
        ({"compile": True}, "training.compile=true: .*set 0, or false"),
        ({"backend": "megatron", "megatron_layers": "te"}, "set training.megatron_layers=local"),
    ],
)
def test_what_cannot_be_balanced_says_what_to_set(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        check_training(dataclasses.replace(config.training, **changes))


def test_a_model_without_experts_is_refused_before_ranks_are_started(tiny_config, tmp_path):
    tiny_config.training.router_balance_coef = 1e-3
    with pytest.raises(ConfigError, match=r"=0\.001: .* is a qwen3 without experts; set 0"):
        train(tiny_config, attempt=1, stop=lambda: False, events=NoEvents())
    with pytest.raises(ConfigError, match="without experts"), opened(tiny_config, []):
        pass
    (tmp_path / "config.json").write_text("{")
    tiny_config.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: not readable .*Hugging Face model"):
        train(tiny_config, attempt=1, stop=lambda: False, events=NoEvents())


def test_routers_that_tell_chances_for_logits_are_refused():
    class Qwen3MoeTopKRouter(torch.nn.Module):
        """As transformers 5.0 has it."""

        def __init__(self, config):
            super().__init__()
            self.hidden_dim = config.hidden_size
            self.weight = torch.nn.Parameter(torch.zeros(EXPERTS, self.hidden_dim))

        def forward(self, hidden):
            return (torch.softmax(hidden @ self.weight.T, -1),)

    model = torch.nn.Module()
    model.config = SimpleNamespace(hidden_size=8)
    model.gate = Qwen3MoeTopKRouter(model.config)
    with pytest.raises(ConfigError, match=r"a\.key=1: .*tells chances .* pip install -U"):
        routers_of(model, "a.key=1")
