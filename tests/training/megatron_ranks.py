"""What each gloo process of the Megatron tests runs: both back ends on the same weights."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from fabricate import fill_spool, make_config, make_group, with_experts
from safetensors.torch import load_file

from agentrl.errors import CheckpointError, ConfigError, DivergedError
from agentrl.events import NoEvents
from agentrl.hf_shape import Layout, read_shape
from agentrl.training import trainer_memory
from agentrl.training.intake import make_batch
from agentrl.training.led import Led, follow
from agentrl.training.loop import train
from agentrl.training.packing import pack
from agentrl.training.ranks import END, World
from agentrl.training.sft_backed import BackedLearner, fitted
from agentrl.training.torch_backend import TorchBackend
from agentrl.training.traces import Trace
from agentrl.weights.version import latest

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


REPLAYED = ", replayed"
"""End of a family's name: its tokens go to experts drawn at random."""
ONE_RANK = ", one rank"
"""Before that: to experts of the first rank of two alone, so that the other has no row."""
BALANCED = ", balanced"
"""End of a family's name: its routers are balanced."""


def make_family(folder: Path, family: str) -> Path:
    """Write a tiny model whose norms and weights are spread enough to tell a wrong map."""
    import transformers

    scaled = {"factor": 4.0, "original_max_position_embeddings": 100, "rope_theta": 10_000.0}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds = {
        "qwen3": ("Qwen3", {"intermediate_size": 64, "tie_word_embeddings": True}),
        "llama": ("Llama", {"intermediate_size": 64, "tie_word_embeddings": False}),
        "llama, scaled by llama3": (
            "Llama",
            {"intermediate_size": 64, "rope_parameters": scaled | llama3},
        ),
        "qwen3, scaled by yarn": (
            "Qwen3",
            {
                "intermediate_size": 64,
                "tie_word_embeddings": True,
                "rope_parameters": scaled | {"rope_type": "yarn"},
            },
        ),
        "qwen3_moe": (
            "Qwen3Moe",
            {
                "moe_intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            },
        ),
    }
    name, more = kinds[family.removesuffix(BALANCED).removesuffix(REPLAYED).removesuffix(ONE_RANK)]
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(folder)
    return folder


CASES = [
    ("qwen3", 1, 1, 1, "packed"),
    ("llama, scaled by llama3", 2, 1, 1, "padded"),
    ("qwen3_moe", 1, 1, 1, "padded"),
    ("qwen3_moe, balanced", 1, 2, 1, "packed"),
    ("qwen3_moe, balanced", 2, 1, 1, "packed"),
    ("qwen3_moe", 2, 2, 1, "packed"),
    ("qwen3, scaled by yarn", 1, 1, 2, "packed"),
    ("qwen3_moe, balanced", 1, 1, 2, "padded"),
    ("qwen3_moe, replayed, balanced", 2, 2, 1, "packed"),
    ("qwen3_moe, replayed", 1, 1, 2, "padded"),
    ("qwen3_moe, one rank, replayed", 1, 2, 1, "packed"),
]
"""Family; tensor, expert, pipeline parallel; packing. Two ranks of 1 × 1 × 1: data parallel."""
MOVES = {
    ("qwen3", Layout()): Layout(tp=2),
    ("qwen3_moe", Layout(tp=2, ep=2)): Layout(),
    ("qwen3_moe, balanced", Layout(ep=2)): Layout(tp=2),
    ("qwen3_moe, balanced", Layout(pp=2)): Layout(ep=2),
}
"""On what cut the state of some cases is taken over as well."""
RUN = "a run"
SFT = "fine-tuning"
REFUSALS = "refusals"
HALF = "bfloat16"
Numbers = dict[str, float]


def note(root: str, case: object, rank: int) -> Path:
    """Return where a rank leaves the numbers of a case that it went through."""
    return Path(root) / f"{case} {rank}.json"


def all_cases(rank: int, size: int, root: str) -> None:
    """Go through the cases in one process, for importing takes longer; leave a file for each."""
    import mcore_cpu_shim

    mcore_cpu_shim.install()
    from megatron.core import parallel_state

    for case in CASES:
        family, tp, ep, pp, packing = case
        found = compare(Path(root) / family, Layout(tp=tp, ep=ep, pp=pp), packing)
        note(root, case, rank).write_text(json.dumps(found))
        parallel_state.destroy_model_parallel()
    said = refusals(Path(root) / "qwen3")
    note(root, REFUSALS, rank).write_text(json.dumps(said))
    parallel_state.destroy_model_parallel()
    note(root, HALF, rank).write_text(json.dumps(half(Path(root) / "qwen3_moe")))
    parallel_state.destroy_model_parallel()
    for case, work in ((RUN, run), (SFT, fine_tune)):
        note(root, case, rank).write_text(json.dumps(work(rank, size, str(Path(root) / "qwen3"))))
        parallel_state.destroy_model_parallel()


def compare(folder: Path, layout: Layout, packing: str) -> Numbers:
    """Return how far both back ends are apart, before, in and after one step."""
    from megatron.core import parallel_state

    from agentrl.training.megatron_backend import MegatronBackend

    config = make_config(folder.parent, folder)
    config.training.packing = packing
    config.training.lr = 1e-4
    config.training.entropy_coef = 0.01
    config.training.weight_decay = 0.1
    config.training.max_grad_norm = 0.2  # of gradients of about 1, and of a weaker step's 0.1
    config.training.recompute = "layers" if layout.tp * layout.pp == 2 else "none"
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    samples = make_batch(groups, 0, config, Counter()).samples
    balances = folder.name.endswith(BALANCED)
    config.training.router_balance_coef = 0.5 if balances else 0.0
    if REPLAYED in folder.name:
        config.engine.sglang.routed_experts = True
        samples = with_experts(samples, count=2 if ONE_RANK in folder.name else 4)
    batches = pack(samples, 67, is_packed=packing == "packed", balances=balances)
    reference = TorchBackend(folder, config)
    start = {name: tensor.clone() for name, tensor in reference.export_hf()}
    logprobs = torch.cat([reference.logprobs(batch) for batch in batches])
    wanted = reference.train_step(batches)
    megatron = MegatronBackend(folder, config, layout)
    before = torch.cat([megatron.logprobs(batch) for batch in batches])
    found = megatron.train_step(batches)
    weights = dict(reference.export_hf())
    off = {name: abs(found[name] - one) / max(1, abs(one)) for name, one in wanted.items()}
    numbers = {
        "logprobs": float((before - logprobs).abs().max()),
        "gaps": largest(torch.tensor(megatron.gaps), torch.tensor(reference.gaps)),
        "weights": apart(dict(megatron.export_hf()), weights),
        "moved": min(largest(weights[name], start[name]) for name in weights),
        "metrics": max(off.values()),
        **held_beside_told(megatron, config),
        "rerouted": found.get("rerouted", 0.0),
        "router_balance": found.get("router_balance", 0.0),
    }
    fresh = MegatronBackend(folder, config, layout)
    state = megatron.state()
    weaker = [replace(batch, advantages=0.1 * batch.advantages) for batch in batches]
    numbers |= go_on(state, weaker, straight=megatron, fresh=fresh, reference=reference)
    if (cut := (folder.name, layout)) not in MOVES:
        return numbers
    ended = dict(megatron.export_hf())
    parallel_state.destroy_model_parallel()
    elsewhere = MegatronBackend(folder, config, MOVES[cut])
    take_over(elsewhere, state)
    elsewhere.train_step(weaker)
    return numbers | {"resumed on another cut": apart(dict(elsewhere.export_hf()), ended)}


def held_beside_told(backend, config) -> Numbers:
    """Return what a rank holds of its model, and what agentrl plan tells of the rank with most."""
    mine = list(backend.policy.parameters())
    groups = [g for part in backend.weights.shards.parts for g in part.optimizer.param_groups]
    shards = [one for group in groups for one in group["params"]]
    ours = {one.untyped_storage().data_ptr() for one in mine}
    masters = [one for one in shards if one.untyped_storage().data_ptr() not in ours]
    held = sum(nbytes(one) + nbytes(one.main_grad) for one in mine) + sum(map(nbytes, masters))
    training = replace(config.training, backend="megatron", ranks=dist.get_world_size())
    told = trainer_memory.held(backend.shape, backend.layout, training)
    return {
        "parameters": sum(one.numel() for one in mine),
        "parameters told": told.rank_parameters,
        "bytes": held + sum(8 * one.numel() for one in shards),  # Adam's two moments
        "bytes told": told.rank_bytes,
    }


def half(folder: Path) -> Numbers:
    """Return what a rank in bfloat16 holds beside what is told."""
    from agentrl.training.megatron_backend import MegatronBackend

    config = make_config(folder.parent, folder)
    config.training.dtype = "bfloat16"
    return held_beside_told(MegatronBackend(folder, config, Layout(ep=2)), config)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def apart(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two models' weights; infinite for other names."""
    if mine.keys() != other.keys():
        return float("inf")
    return max(largest(mine[name], other[name]) for name in mine)


def go_on(state, batches, *, straight, fresh, reference) -> Numbers:
    """Return how far back ends that took the state over are from the one that went on."""
    take_over(fresh, state)
    reference.restore(state)  # of another layout, and another back end
    for backend in (straight, fresh, reference):
        backend.train_step(batches)
    ended = dict(straight.export_hf())
    return {
        "resumed": apart(ended, dict(fresh.export_hf())),
        "resumed by torch": apart(ended, dict(reference.export_hf())),
    }


def take_over(megatron, state) -> None:
    """Restore rank 0's state on every rank."""
    told = state if dist.get_rank() == 0 else None
    kinds = ("exp_avg", "exp_avg_sq", "step")
    megatron.restore(told, updates=state.updates, kinds=kinds)


def refusals(folder: Path) -> dict[str, str]:
    """Return what a back end says to what it cannot do."""
    from megatron.core import parallel_state

    from agentrl.training.megatron_backend import MegatronBackend

    config = make_config(folder.parent, folder)
    said = {}
    if importlib.util.find_spec("transformer_engine") is None:
        try:
            MegatronBackend(folder, config, Layout(spec="te"))
        except ConfigError as error:
            said["te"] = str(error)
        parallel_state.destroy_model_parallel()
    backend = MegatronBackend(folder, config, Layout(pp=2))
    before = {name: one.clone() for name, one in backend.export_hf()}
    samples = make_batch([make_group(0, [1, 0, 0, 1, 0])], 0, config, Counter()).samples
    batches = pack(samples, 67, is_packed=True)
    batches[0].weights[0] = float("nan")
    try:
        backend.train_step(batches)
    except DivergedError as error:
        said["no number"] = str(error)
    said["moved since"] = str(apart(dict(backend.export_hf()), before))
    state = backend.state()
    narrow = {**state.model, "model.norm.weight": torch.ones(8)}
    try:
        backend.weights.take("param", narrow)
    except CheckpointError as error:
        said["shape"] = str(error)
    return said | {"loop": loop_refused(), "router": router_dtype()}


def mixture_config(dtype: torch.dtype):
    from agentrl.training.megatron_layers import make_config

    hf = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    hf |= {"moe_intermediate_size": 16, **SIZES}
    return make_config(read_shape(hf), hf, Layout(pp=2), dtype)


def loop_refused() -> str:
    """Return what is said of Megatron's own local layers, one on this stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from agentrl.training.grouped_experts import check_experts

    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, qk_layernorm=False)
    mixture = build_module(spec.submodules.mlp, config=mixture_config(torch.float32))
    try:
        check_experts(mixture, 1)
    except ConfigError as error:
        return str(error)
    return ""


def router_dtype() -> str:
    """Return the dtype of a bfloat16 layer's router's logits."""
    from agentrl.training.grouped_experts import Mixture

    mixture = Mixture(mixture_config(torch.bfloat16))
    hidden = torch.ones(3, 1, SIZES["hidden_size"], dtype=torch.bfloat16)
    return str(mixture.router.gating(hidden).dtype)


def run(rank: int, size: int, folder: str) -> Numbers:
    """Train by the loop: straight, and stopped and resumed; return how far the ends are apart."""
    from agentrl.training.megatron_backend import MegatronBackend

    world = World(rank=rank, size=size, control=dist.new_group(backend="gloo"))
    config = make_config(Path(folder).parent, Path(folder))
    config.training.ranks = size
    config.training.max_trained_staleness = config.training.steps
    ends = []
    for name, steps in (("straight", 3), ("halved", 1), ("halved", 3)):
        config.name, config.training.steps = name, steps
        backend = MegatronBackend(Path(folder), config, Layout())
        if rank:
            follow(backend, world, config)
            continue
        if len(ends) < 2:
            fill_spool(config, range(6))
        led = Led(backend, world)
        train(config, attempt=steps, stop=lambda: False, events=NoEvents(), backend=led)
        world.tell(END)
        ends.append(load_file(latest(config.run_dir / "weights").folder / "model.safetensors"))
    if rank:
        return {}
    return {"resumed": apart(ends[2], ends[0]), "moved": apart(ends[1], ends[0])}


def fine_tune(rank: int, size: int, folder: str) -> Numbers:
    """Learn traces by Megatron over the ranks and by torch alone; return how far they are apart."""
    from agentrl.training.megatron_backend import MegatronBackend

    world = World(rank=rank, size=size, control=dist.new_group(backend="gloo"))
    config = make_config(Path(folder).parent, Path(folder))
    config.training.ranks, config.training.packing = size, "packed"
    config.sft.batch, config.sft.epochs, config.sft.lr = 3, 2, 1e-3
    config.sft.context_weight = 0.1
    traces = [
        Trace(tokens=one.tokens, loss_mask=one.loss_mask)
        for draw in range(3)
        for one in make_group(draw, [1, 0, 1]).trajectories
    ]
    suited = fitted(config, len(traces))
    backend = MegatronBackend(Path(folder), suited, Layout())
    if rank:
        follow(backend, world, suited)
        return {}
    alone = replace(suited, training=replace(suited.training, ranks=1))
    learners = (
        BackedLearner(suited, Led(backend, world), traces),
        BackedLearner(alone, TorchBackend(Path(folder), alone), traces),
    )
    for one in learners:
        while one.step < one.steps:
            one.take_step()
    ours, theirs = (dict(one.weights()) for one in learners)
    world.tell(END)
    first, last = learners[0].losses[0], learners[0].losses[-1]
    return {
        "weights": apart(ours, theirs),
        "losses": largest(*(torch.tensor(one.losses) for one in learners)),
        "learned": first - last,
    }
