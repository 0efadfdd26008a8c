from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fabricate import make_group, write_traces
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentrl.errors import RecordError
from agentrl.handoff.spool import SpoolWriter
from agentrl.training.model_folder import load_model
from agentrl.training.muon import Muon, orthogonalize
from agentrl.training.packing import pack_step
from agentrl.training.sft import opened, run_sft, token_losses
from agentrl.training.sft_backed import BackedLearner, fitted, samples_of
from agentrl.training.torch_backend import TorchBackend
from agentrl.training.traces import Trace, deal, read_traces, stack


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_fine_tuning_learns_the_traces_and_writes_a_model_folder(tiny_config, odd_path):
    tiny_config.sft.epochs = 6
    seen = []
    traces = write_traces(odd_path / "traces.jsonl")
    code = run_sft(tiny_config, traces, odd_path / "sft", progress=lambda *told: seen.append(told))
    assert code == 0
    assert [step for step, _, _ in seen] == list(range(1, 19))
    assert seen[-1][2] < 0.7 * seen[0][2]
    batch = stack(read_traces(traces), 0.0)
    assert token_losses(load(odd_path / "sft"), batch).mean().item() < 0.7 * seen[0][2]
    summary = json.loads((odd_path / "sft.sft.json").read_text())
    assert summary["steps"] == 18
    assert sorted(path.name for path in odd_path.iterdir()) == [
        "sft",
        "sft.sft.json",
        "traces.jsonl",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_of_a_back_end_learn_the_traces(tiny_config, tmp_path):
    traces, told = write_traces(tmp_path / "traces.jsonl"), []
    tiny_config.training.ranks, tiny_config.sft.context_weight = 2, 0.0
    tiny_config.training.weight_decay, tiny_config.agent.temperature = 0.5, 0.5
    tiny_config.sft.epochs = 6
    code = run_sft(tiny_config, traces, tmp_path / "out", progress=lambda *one: told.append(one[2]))
    assert (code, len(told)) == (0, 18)
    batch = stack(read_traces(traces), 0.0)
    assert token_losses(load(tmp_path / "out"), batch).mean().item() < 0.7 * told[0]


def test_a_back_ends_learner_goes_on_from_its_share_bit_for_bit(tiny_model, tiny_config, tmp_path):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl"))
    config = fitted(tiny_config, len(traces))

    def learner():
        return BackedLearner(config, TorchBackend(tiny_model, config), traces)

    first, second = learner(), learner()
    first.take_step()
    second.restore(first.share(tmp_path))
    assert first.take_step() == second.take_step()
    pairs = zip(first.weights(), second.weights(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


def test_a_back_ends_loss_and_gradient_are_those_of_cross_entropy(
    tiny_model, tiny_config, tmp_path
):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl", 5))
    config = fitted(tiny_config, 5)
    backend = TorchBackend(tiny_model, config)
    found = backend.train_step(pack_step(samples_of(traces, 0.3), config.training))
    batch, model = stack(traces, 0.3), load_model(tiny_model)
    losses = token_losses(model, batch)
    assert found["gap"] == pytest.approx(float(losses.mean()), rel=1e-5)
    ((losses * batch.weights).sum() / batch.weights.sum()).backward()
    for mine, other in zip(backend.model.parameters(), model.parameters(), strict=True):
        scale = min(1.0, 1 / found["grad_norm"])  # the back end's are clipped by now
        torch.testing.assert_close(mine.grad, other.grad * scale, atol=1e-6, rtol=1e-4)


def test_a_back_end_learns_what_the_cpu_does_whatever_is_set_for_rl(tiny_config, tmp_path):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl"))
    tiny_config.sft.muon_lr, tiny_config.sft.context_weight = 0.0, 0.0
    with opened(tiny_config, traces) as alone:
        training = replace(tiny_config.training, weight_decay=0.1, beta1=0.5, beta2=0.6)
        agent = replace(tiny_config.agent, temperature=0.5)
        config = fitted(replace(tiny_config, training=training, agent=agent), len(traces))
        backed = BackedLearner(config, TorchBackend(Path(config.model.path), config), traces)
        for _ in range(alone.steps):
            assert alone.take_step() == pytest.approx(backed.take_step(), rel=1e-5)
    for (_, one), (_, other) in zip(alone.weights(), backed.weights(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_temperature_and_decay_of_rl_change_no_bit_of_a_back_ends_steps(tiny_model, tiny_config):
    tokens = np.arange(20, dtype=np.int32)
    traces = [Trace(tokens=tokens, loss_mask=tokens > 4)]
    tiny_config.sft.context_weight, ends = 0.0, []
    for temperature, decay in ((1.0, 0.0), (0.5, 0.1)):
        tiny_config.agent.temperature, tiny_config.training.weight_decay = temperature, decay
        config = fitted(tiny_config, 1)
        learner = BackedLearner(config, TorchBackend(tiny_model, config), traces)
        first = learner.take_step()
        ends.append([first, *(tensor.tolist() for _, tensor in learner.weights())])
    assert ends[0] == ends[1]
    losses = token_losses(load_model(tiny_model), stack(traces, 0.0))
    assert ends[1][0] == pytest.approx(losses.mean().item(), rel=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_a_back_end_says_that_it_has_no_muon_where_it_is_asked_for(mixture_config, caplog, rate):
    mixture_config.sft.muon_lr = rate
    with opened(mixture_config, []):
        assert not caplog.records
    mixture_config.training.router_balance_coef = 1e-3
    with opened(mixture_config, []):
        said = "sft.muon_lr=0.01 is not used: a back end .* by Adam at sft.lr=0.003"
    assert bool(re.search(said, caplog.text)) == bool(rate)


def test_traces_are_read_from_spool_files_too(tmp_path):
    SpoolWriter(tmp_path, 0).write(make_group(3, [1, 0]))
    traces = read_traces(tmp_path)
    assert len(traces) == 2
    assert traces[0].tokens.tolist() == make_group(3, [1, 0]).trajectories[0].tokens.tolist()


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_that_the_model_has_not_is_named_before_anything_is_learnt(
    tiny_config, tmp_path, token
):
    trace = {"tokens": [1, token], "loss_mask": [False, True]}
    (tmp_path / "t.jsonl").write_text(json.dumps(trace))
    words = r"trace 0 has tokens .* vocabulary 64 words"
    with pytest.raises(RecordError, match=words):
        run_sft(tiny_config, tmp_path / "t.jsonl", tmp_path / "out")


def test_a_batch_in_which_nobody_wrote_anything_is_no_divergence(tiny_config, tmp_path):
    masks = [[False, False, wrote] for wrote in (False, True, False)]
    lines = [json.dumps({"tokens": [1, 2, 3], "loss_mask": mask}) for mask in masks]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    tiny_config.sft.context_weight, tiny_config.sft.batch, tiny_config.sft.epochs = 0.0, 1, 1
    assert run_sft(tiny_config, tmp_path / "t.jsonl", tmp_path / "out") == 0


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"tokens": [1]}',
        '{"tokens": [1, 2], "loss_mask": [true]}',
        '{"tokens": [1, 9999999999], "loss_mask": [true, true]}',
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text('{"tokens": [1, 2], "loss_mask": [false, true]}\n' + line)
    with pytest.raises(RecordError, match=r"t\.jsonl:2"):
        read_traces(tmp_path / "t.jsonl")


def test_no_traces_are_an_error(tmp_path):
    with pytest.raises(RecordError, match="make them first"):
        read_traces(tmp_path / "none")
    with pytest.raises(RecordError, match="none of 0"):
        read_traces(tmp_path)


def test_context_tokens_weigh_less_and_with_zero_are_left_out():
    trace = Trace(
        tokens=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
    )
    assert stack([trace], 0.25).weights.tolist() == [0.25, 1, 1]
    without = stack([trace], 0.0)
    assert without.targets.tolist() == [7, 8]
    assert without.source.tolist() == [1, 2]


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_loss_that_is_told_is_of_what_the_assistant_wrote(weight):
    trace = Trace(
        tokens=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
    )
    batch = stack([trace], weight)
    assert batch.targets[batch.written].tolist() == [7, 8]


def test_padding_changes_no_loss(tiny_model):
    rng = np.random.default_rng(0)
    short, long = (
        Trace(
            tokens=rng.integers(0, 64, size, dtype=np.int32),
            loss_mask=np.ones(size, dtype=np.bool_),
        )
        for size in (6, 15)
    )
    model = load_model(tiny_model)
    with torch.no_grad():
        together = token_losses(model, stack([short, long], 0.3))
        alone = [token_losses(model, stack([trace], 0.3)) for trace in (short, long)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_deals_every_trace_once(count, batch, epoch):
    traces = [
        Trace(tokens=np.zeros(2 + i % 7, np.int32), loss_mask=np.zeros(2 + i % 7, np.bool_))
        for i in range(count)
    ]
    batches = deal(traces, batch, seed=1, epoch=epoch)
    assert sorted(index for dealt in batches for index in dealt) == list(range(count))
    assert max(map(len, batches)) <= batch
    assert batches == deal(traces, batch, seed=1, epoch=epoch)


def test_newton_schulz_brings_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 16, 40)))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_agrees_with_torchs_own():
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 12), (12, 8), (8, 12))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in mine]
    ours, other = Muon(mine, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        other.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, atol=0.02)  # theirs iterates in bfloat16
