"""Both back ends on one GPU in bfloat16: NCCL, the real kernels, `te` where it imports.

Run it with hardware that CI lacks: python -m pytest -m gpu tests/training
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch
from fabricate import make_config, make_group, with_experts
from megatron_ranks import BALANCED, REPLAYED, make_family

from agentrl.training import ranks
from agentrl.training.backends import open_backend, open_megatron
from agentrl.training.intake import make_batch
from agentrl.training.packing import pack_step
from agentrl.training.torch_backend import TorchBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.20'",
    ),
]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed: run this in the trainer's image",
)


def make_run(tmp_path, family, layers):
    folder = make_family(tmp_path / "model", family)
    config = make_config(tmp_path, folder)
    training = config.training
    training.backend, training.megatron_layers = "megatron", layers
    training.device, training.dtype, training.packing = "gpu", "bfloat16", "packed"
    training.lr, training.micro_batch_tokens = 1e-4, 67
    config.engine.sglang.routed_experts = family.endswith(REPLAYED)
    training.router_balance_coef = 0.5 if family.endswith(BALANCED) else 0.0
    return folder, config


FAMILIES = ("qwen3", "llama", "qwen3_moe")
SAME = {"loss", "entropy", "grad_norm", "ess", "rerouted", "router_balance", "busiest_expert"}


@pytest.mark.parametrize(
    ("layers", "family"),
    [
        *(("local", family) for family in FAMILIES),
        *(("local", f"qwen3_moe{how}") for how in (REPLAYED, BALANCED)),
        *(pytest.param("te", family, marks=needs_te) for family in FAMILIES),
    ],
)
def test_on_a_gpu_megatron_is_as_near_to_float32_as_torch_is(tmp_path, family, layers):
    folder, config = make_run(tmp_path, family, layers)
    batches = steps(config)
    plain = exact_config(tmp_path, folder)
    plain.engine.sglang.routed_experts = config.engine.sglang.routed_experts
    exact = TorchBackend(folder, plain)
    wanted = [exact.logprobs(batch) for batch in batches]
    with ranks.started(config) as world:
        ours, theirs = open_megatron(config), TorchBackend(folder, config, world=world)
        mine, other = (error(one, batches, wanted) for one in (ours, theirs))
        assert mine < 1.5 * other + 1e-3, (mine, other)
        found, known = ours.train_step(batches), theirs.train_step(batches)
        for name in SAME & known.keys():
            assert found[name] == pytest.approx(known[name], rel=0.03, abs=0.01), name
        goes_on(ours, open_megatron(config), batches)


TWO = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
FOUR = [(2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("tensor", "expert", "stages", "number"),
    [*((*cut, 2) for cut in TWO), *((*cut, 4) for cut in FOUR)],
)
def test_several_ranks_do_what_one_does(tmp_path, tensor, expert, stages, number):
    """Each on a GPU of its own, or sharing those that are here: NCCL either way."""
    _, config = make_run(tmp_path, "qwen3_moe", "local")
    alone = learned(config)
    config.training.ranks = number
    config.training.share_gpus = torch.cuda.device_count() < number
    config.training.tensor_parallel, config.training.expert_parallel = tensor, expert
    config.training.pipeline_parallel = stages
    together = learned(config)
    for name in ("loss", "entropy", "grad_norm", "ess"):
        assert together[name] == pytest.approx(alone[name], rel=0.03, abs=0.01), name


def learned(config):
    """Return the metrics of two steps."""
    batches = steps(config)
    with ranks.started(config) as world:
        backend = open_backend(config, world)
        backend.train_step(batches)
        found = backend.train_step(batches)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(autouse=True)
def groups_end():
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def exact_config(tmp_path, folder):
    config = make_config(tmp_path, folder)
    config.training.packing = "packed"
    return config


def steps(config):
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    samples = make_batch(groups, 0, config, Counter()).samples
    replays = config.engine.sglang.routed_experts
    return pack_step(with_experts(samples) if replays else samples, config.training)


def error(backend, batches, wanted):
    """Return the mean distance of its log-probabilities from those of float32, nats."""
    pairs = zip(batches, wanted, strict=True)
    return float(torch.cat([(backend.logprobs(one) - known).abs() for one, known in pairs]).mean())


def goes_on(ours, fresh, batches):
    """Fail unless a back end that took the state over goes on within bfloat16's noise."""
    state = ours.state()
    fresh.restore(state, updates=state.updates, kinds=("exp_avg", "exp_avg_sq", "step"))
    for backend in (ours, fresh):
        backend.train_step(batches)
    straight = dict(ours.export_hf())
    for name, tensor in fresh.export_hf():
        torch.testing.assert_close(tensor, straight[name], atol=3e-4, rtol=1e-2)
