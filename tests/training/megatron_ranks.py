"""What each gloo process of the Megatron tests runs: both back ends on the same weights."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from fabricate import fill_spool, make_config, make_group

from agentrl.events import NoEvents
from agentrl.training.hf_map import Layout
from agentrl.training.intake import make_batch
from agentrl.training.led import Led, follow
from agentrl.training.loop import train
from agentrl.training.packing import pack
from agentrl.training.ranks import END, World
from agentrl.training.torch_backend import TorchBackend
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


def make_family(folder: Path, family: str) -> Path:
    """Write a tiny model whose norms and weights are spread enough to tell a wrong map."""
    import transformers

    kinds = {
        "qwen3": ("Qwen3", {"intermediate_size": 64, "tie_word_embeddings": True}),
        "llama": ("Llama", {"intermediate_size": 64, "tie_word_embeddings": False}),
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
    name, more = kinds[family]
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
    ("qwen3", 1, 1, "packed"),
    ("llama", 2, 1, "padded"),
    ("qwen3_moe", 1, 1, "padded"),
    ("qwen3_moe", 1, 2, "packed"),
    ("qwen3_moe", 2, 1, "packed"),
    ("qwen3_moe", 2, 2, "packed"),
]
"""Family, tensor parallel, expert parallel, packing; on two ranks 1 × 1 is data parallel."""
RUN = "a run"


def all_cases(rank: int, size: int, root: str) -> None:
    """Go through the cases in one process, for importing takes longer; leave a file for each."""
    import mcore_cpu_shim

    mcore_cpu_shim.install()
    from megatron.core import parallel_state

    for case in CASES:
        family, tp, ep, packing = case
        folder = Path(root) / family
        agree(rank, folder, (tp, ep), packing)
        (Path(root) / f"{case} {rank}").touch()
        parallel_state.destroy_model_parallel()
    run(rank, size, str(Path(root) / "qwen3"))
    (Path(root) / f"{RUN} {rank}").touch()


def agree(rank: int, folder: Path, cut: tuple[int, int], packing: str) -> None:
    """Fail unless log-probabilities, metrics and one step's weights are equal to 1e-5."""
    from agentrl.training.megatron_backend import MegatronBackend

    config = make_config(folder.parent, folder)
    config.training.packing = packing
    config.training.lr = 1e-4
    config.training.entropy_coef = 0.01
    config.training.weight_decay = 0.1
    config.training.recompute = "layers" if cut[0] == 2 else "none"
    groups = [make_group(draw, [1, 0, 0, 1, 0]) for draw in (0, 1)]
    samples = make_batch(groups, 0, config, Counter()).samples
    batches = pack(samples, 67, is_packed=packing == "packed")
    reference = TorchBackend(folder, config)
    start = {name: tensor.clone() for name, tensor in reference.export_hf()}
    logprobs = [reference.logprobs(batch) for batch in batches]
    wanted = reference.train_step(batches)
    weights = dict(reference.export_hf())
    megatron = MegatronBackend(folder, config, Layout(tp=cut[0], ep=cut[1]))
    apart = max(
        float((megatron.logprobs(batch) - known).abs().max())
        for batch, known in zip(batches, logprobs, strict=True)
    )
    found = megatron.train_step(batches)
    assert torch.allclose(torch.tensor(megatron.gaps), torch.tensor(reference.gaps), atol=1e-5)
    exported = dict(megatron.export_hf())
    assert exported.keys() == weights.keys()
    moved = max(float((exported[name] - weights[name]).abs().max()) for name in weights)
    where = f"{folder.name} {cut} {packing}, rank {rank}"
    print(f"{where}: logprobs {apart:.1e}, weights {moved:.1e}", file=sys.stderr)
    assert apart < 1e-5, apart
    assert moved < 1e-5, moved
    assert all(not torch.equal(weights[name], start[name]) for name in weights)
    for name, value in wanted.items():
        assert abs(found[name] - value) < 1e-4 * max(1, abs(value)), (name, found[name], value)
    goes_on(megatron, MegatronBackend(folder, config, megatron.layout), reference, batches)


def goes_on(megatron, fresh, reference, batches) -> None:
    """Fail unless a back end that took the state over goes on as if nothing had been."""
    state = megatron.state()
    kinds = ("exp_avg", "exp_avg_sq", "step")
    leads = dist.get_rank() == 0
    fresh.restore(state if leads else None, updates=state.updates, kinds=kinds)
    reference.restore(state)  # of another layout, and another back end
    for backend in (megatron, fresh, reference):
        backend.train_step(batches)
    straight, resumed = dict(megatron.export_hf()), dict(fresh.export_hf())
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    for name, tensor in reference.export_hf():
        torch.testing.assert_close(straight[name], tensor, atol=1e-5, rtol=0)


def run(rank: int, size: int, folder: str) -> None:
    """Train by the loop: straight, and stopped and resumed; the last weights must be equal."""
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
        ends.append((latest(config.run_dir / "weights").folder / "model.safetensors").read_bytes())
    assert rank or ends[0] == ends[2] != ends[1]
