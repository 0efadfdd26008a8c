"""Fine-tuning that is stopped, or fails: its checkpoints, and what is written at the end."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fabricate import make_config, make_model, write_traces
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.errors import CheckpointError, PublishError
from agentrl.events import NoEvents
from agentrl.training.model_folder import write_model_folder
from agentrl.training.sft import Saves, opened, run_sft
from agentrl.training.sft_backed import BackedLearner, fitted
from agentrl.training.torch_backend import TorchBackend
from agentrl.training.traces import read_traces


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def steps_of(config, traces, out, *, upto=None):
    """Fine-tune, until step `upto` if there is one; return the steps that were taken for it."""
    taken = []
    code = run_sft(
        config,
        traces,
        out,
        stop=lambda: taken[-1:] == [upto],
        progress=lambda step, steps, loss: taken.append(step),
    )
    assert code == (0 if upto is None else 75)
    return taken


def test_stopped_and_called_again_it_ends_with_the_same_weights(tiny_config, tmp_path):
    traces = write_traces(tmp_path / "traces.jsonl")
    run_sft(tiny_config, traces, tmp_path / "straight")
    reached = []
    code = run_sft(
        tiny_config,
        traces,
        tmp_path / "halved",
        stop=lambda: len(reached) == 4,
        progress=lambda *told: reached.append(told),
    )
    assert code == 75
    assert run_sft(tiny_config, traces, tmp_path / "halved") == 0
    straight, halved = load(tmp_path / "straight"), load(tmp_path / "halved")
    pairs = zip(straight.parameters(), halved.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_result_that_could_not_be_written_is_all_that_is_done_again(tiny_config, tmp_path):
    traces = write_traces(tmp_path / "traces.jsonl")
    assert steps_of(tiny_config, traces, tmp_path / "straight") == [1, 2, 3, 4, 5, 6]
    (tmp_path / ".out.tmp").write_text("a file where the folder is to be made")
    with pytest.raises(PublishError, match=r"writing .*out"):
        run_sft(tiny_config, traces, tmp_path / "out")
    (tmp_path / ".out.tmp").unlink()
    assert steps_of(tiny_config, traces, tmp_path / "out") == []
    names = [path / "model.safetensors" for path in (tmp_path / "straight", tmp_path / "out")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert not (tmp_path / "out.checkpoints").exists()
    assert steps_of(tiny_config, traces, tmp_path / "out") == [1, 2, 3, 4, 5, 6]


def test_a_disk_with_room_for_the_result_alone_gets_it(tmp_path, request, caplog):
    config = make_config(tmp_path, make_model(tmp_path / "model", hidden=40))
    config.sft.muon_lr = 0.0
    traces = write_traces(tmp_path / "traces.jsonl")
    request.getfixturevalue("small_files_only")
    assert run_sft(config, traces, tmp_path / "out") == 0
    assert "The result is written without it" in caplog.text
    assert len(load_file(tmp_path / "out" / "model.safetensors")) > 10
    assert not (tmp_path / "out.checkpoints").exists()


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, of which no test has one; it can but be copied to the CPU."""

    @staticmethod
    def __new__(cls, there):
        return torch.Tensor._make_wrapper_subclass(
            cls, there.shape, dtype=there.dtype, device="cuda"
        )

    def __init__(self, there):
        self.there = there

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].there)
        assert function is torch.ops.aten._to_copy.default, function
        return args[0].there.to(kwargs["device"], copy=True)


def test_of_a_result_one_tensor_at_a_time_is_on_the_gpu(tiny_model, tmp_path):
    made, alive = [], []

    def weights():
        for number in range(6):
            memory = torch.full((3, 2), float(number))
            made.append(weakref.ref(memory))
            yield f"tensor {number}", OnGpu(memory)
            del memory
            alive.append(sum(one() is not None for one in made))

    write_model_folder(tmp_path / "out", weights(), tiny_model)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [float(found[f"tensor {number}"].mean()) for number in range(6)] == [*range(6)]
    assert max(alive) == 1


@pytest.mark.usefixtures("small_files_only")
def test_a_disk_too_full_for_the_result_leaves_what_was_there(tmp_path):
    old, weights = tmp_path / "out", [("model.norm.weight", torch.ones(100_000))]
    old.mkdir()
    with pytest.raises(PublishError, match=r"writing .*out: .*what was there stays"):
        write_model_folder(old, weights, old)
    assert list(tmp_path.iterdir()) == [old]


def test_a_checkpoint_of_other_traces_is_not_taken_up(tiny_config, tmp_path):
    traces = write_traces(tmp_path / "traces.jsonl")
    reached = []
    run_sft(
        tiny_config,
        traces,
        tmp_path / "out",
        stop=lambda: len(reached) == 2,
        progress=lambda *told: reached.append(told),
    )
    write_traces(traces, count=16)
    steps = []
    run_sft(tiny_config, traces, tmp_path / "out", progress=lambda *told: steps.append(told[:2]))
    assert steps == [(step, 4) for step in range(1, 5)]


@pytest.mark.parametrize("coefficients", [(0.0, 1e-3), (1e-3, 0.0)], ids=["to", "from"])
def test_a_back_end_and_the_cpus_learner_start_anew_after_each_other(
    mixture_config, tmp_path, coefficients
):
    traces, training = write_traces(tmp_path / "traces.jsonl"), mixture_config.training
    training.router_balance_coef = coefficients[0]
    assert steps_of(mixture_config, traces, tmp_path / "out", upto=2) == [1, 2]
    assert steps_of(mixture_config, traces, tmp_path / "out", upto=3) == [3]
    training.router_balance_coef = coefficients[1]
    assert steps_of(mixture_config, traces, tmp_path / "out", upto=1) == [1]


def test_back_ends_go_on_after_each_other_over_any_ranks_and_cut(tiny_config, tmp_path):
    found = set()
    for name, ranks, parallel in (("torch", 2, 1), ("torch", 4, 1), ("megatron", 2, 2)):
        training = replace(
            tiny_config.training, backend=name, ranks=ranks, tensor_parallel=parallel
        )
        config = replace(tiny_config, training=training)
        found.add(Saves(config, tmp_path / "out", [], NoEvents()).identity)
    assert len(found) == 1
    assert Saves(tiny_config, tmp_path / "out", [], NoEvents()).identity not in found


@pytest.mark.parametrize("rates", [(0.01, 0.0), (0.0, 0.01)], ids=["no Muon", "no Adam"])
def test_a_state_by_other_optimizers_is_refused_before_anything_is_taken_over(
    tiny_config, tmp_path, rates
):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl"))
    with opened(
        replace(tiny_config, sft=replace(tiny_config.sft, muon_lr=rates[0])), traces
    ) as one:
        one.take_step()
        state = one.share(tmp_path)
    with opened(
        replace(tiny_config, sft=replace(tiny_config.sft, muon_lr=rates[1])), traces
    ) as one:
        before = [tensor.clone() for _, tensor in one.weights()]
        with pytest.raises(CheckpointError, match=r"by other optimizers: .* differ; remove its"):
            one.restore(state)
        assert all(map(torch.equal, before, (tensor for _, tensor in one.weights())))


@pytest.mark.parametrize("kind", ["momentum", "exp_avg", "step"])
def test_a_state_without_a_kind_of_the_optimizers_is_refused(tiny_config, tmp_path, kind):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl"))
    with opened(tiny_config, traces) as learner:
        learner.take_step()
        state = learner.share(tmp_path)
        kept = {key: one for key, one in state.optimizer.items() if not key.startswith(f"{kind}/")}
        with pytest.raises(CheckpointError, match=f"{kind} differ"):
            learner.restore(replace(state, optimizer=kept))


def test_a_share_that_does_not_come_is_awaited_as_long_as_the_config_says(tiny_config, tmp_path):
    traces = read_traces(write_traces(tmp_path / "traces.jsonl"))
    tiny_config.training.ranks, tiny_config.training.checkpoint_timeout_s = 2, 0.2
    config = fitted(tiny_config, len(traces))
    learner = BackedLearner(config, TorchBackend(Path(config.model.path), config), traces)
    saves = Saves(config, tmp_path / "out", traces, NoEvents())
    with pytest.raises(PublishError, match=r"after 0\.2 s rank 1 has not written its share"):
        saves.save(learner)
