"""How fast a trainer gives its weights away, against plain copies and all-gathers of as many bytes.

    python -m benchmarks.export_push [--ranks 2] [--backend megatron] [--layers 8] [--out FILE]

A cut of Qwen3-30B-A3B (real widths, few layers, random weights, bfloat16) lies over the ranks as a
run has it: FSDP2 (`torch`), or experts over all ranks (`megatron`). Timed is the median of rounds:
export: every weight whole under its Hugging Face name on rank 0, each dropped when the next comes;
push: rank 0 sends the whole model in buckets to all others, which stand for engines (2 ranks and
more; benchmarks.engine_push has real engines, and one GPU).
Against, on the same ranks and as many bytes: an all-gather of buckets (export; a copy on the device
where there is one rank), and a broadcast of buckets that lie ready (push).
`--device cpu` goes over gloo with a tiny model: that the way works, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.training import ranks
from agentrl.training.backends import follow, open_backend
from agentrl.weights import group as groups
from agentrl.weights.push import buckets_of
from agentrl.weights.pusher import room_for, send_buckets
from benchmarks.logprob_loss import command, versions

BUCKET_BYTES = 512 << 20
Work = Callable[[], object]


def make_folder(folder: Path, layers: int, device: str) -> Path:
    if device == "gpu":
        from benchmarks.moe_step import make_model

        make_model(folder, layers)
        torch.cuda.empty_cache()
        return folder
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(num_hidden_layers=layers, num_experts_per_tok=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def settings(folder: Path, options: argparse.Namespace) -> RunConfig:
    config = RunConfig()
    config.model.path = str(folder)
    training = config.training
    training.backend, training.device = options.backend, options.device
    training.ranks, training.packing, training.dtype = options.ranks, "packed", "bfloat16"
    if options.backend == "megatron":
        training.expert_parallel = options.ranks
    return config


def median_s(work: Work, rounds: int) -> float:
    """Return the median time after one round to warm up; all ranks must call it alike."""
    times = []
    for _ in range(rounds + 1):
        settle()
        began = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def settle() -> None:
    """Wait for this rank's GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def send(tensors: dict[str, Tensor], world: ranks.World) -> None:
    """Broadcast from rank 0 in buckets, as weights.pusher does; be an engine on the others."""
    buckets = buckets_of(tensors.items(), BUCKET_BYTES)
    if world.leads:
        send_buckets(buckets, iter(tensors.items()), None, world.device)
        return
    for bucket in buckets:
        flat, _ = room_for(bucket.dtypes, bucket.shapes, str(world.device))
        dist.broadcast(flat, 0)


def gather(size: int, device: torch.device) -> Work:
    """Return all-gathers of `size` bytes in all, a bucket at a time, as ranks have their shares."""
    world = dist.get_world_size()
    share = min(BUCKET_BYTES, size) // world
    mine = torch.zeros(share, dtype=torch.uint8, device=device)
    whole = torch.zeros(share * world, dtype=torch.uint8, device=device)

    def run() -> None:
        for _ in range(max(1, size // (share * world))):
            dist.all_gather_into_tensor(whole, mine)

    return run


def broadcast(size: int, device: torch.device) -> Work:
    """Return broadcasts of `size` bytes in all from rank 0, a bucket at a time."""
    bucket = torch.zeros(min(BUCKET_BYTES, size), dtype=torch.uint8, device=device)

    def run() -> None:
        for _ in range(max(1, size // len(bucket))):
            dist.broadcast(bucket, 0)

    return run


def copy(size: int, device: torch.device) -> Work:
    source = torch.zeros(min(size, 4 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(-(-size // len(source))):
            target.copy_(source)

    return run


def drop_all(backend: Any) -> None:
    for _ in backend.export_hf():
        pass


def lead(config: RunConfig, options: argparse.Namespace) -> dict[str, float]:
    """Start the other ranks, be rank 0, and return what was measured."""
    store = groups.host("127.0.0.1", options.ranks, 600)
    place = {"WORLD_SIZE": options.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    more = ["--model", config.model.path]
    environments = [
        {**os.environ, **{name: str(value) for name, value in place.items()}}
        | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(options.ranks)
    ]
    others = [
        subprocess.Popen([*sys.orig_argv, *more], env=environment)
        for environment in environments[1:]
    ]
    try:
        return measure(config, ranks.join(environments[0], config), options.rounds)
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(config: RunConfig, world: ranks.World, rounds: int) -> dict[str, float]:
    """Rank 0: return GB/s of each way; the others run `take_part`."""
    backend = open_backend(config, world)
    drop_s = median_s(lambda: drop_all(backend), rounds)
    named = {name: tensor.contiguous() for name, tensor in backend.export_hf()}
    size = sum(tensor.nbytes for tensor in named.values())
    world.tell(ranks.END)
    world.tell(1, {name: torch.tensor(tensor.shape) for name, tensor in named.items()})
    seconds = {"export": drop_s, **together(named, size, world, rounds)}
    return {"bytes": size, **{f"{name}_gb_s": size / 1e9 / one for name, one in seconds.items()}}


def take_part(config: RunConfig, world: ranks.World, rounds: int) -> None:
    follow(config, world)
    _, shapes = world.heed()
    named = {
        name: torch.empty(shape.tolist(), dtype=torch.bfloat16, device=world.device)
        for name, shape in shapes.items()
    }
    together(named, sum(tensor.nbytes for tensor in named.values()), world, rounds)


def together(
    named: dict[str, Tensor], size: int, world: ranks.World, rounds: int
) -> dict[str, float]:
    found = {"copy": median_s(copy(size, world.device), rounds)}
    if world.size > 1:
        ordered = dict(sorted(named.items()))  # what is told by safetensors comes in its own order
        found["push"] = median_s(lambda: send(ordered, world), rounds)
        found["all_gather"] = median_s(gather(size, world.device), rounds)
        found["broadcast"] = median_s(broadcast(size, world.device), rounds)
    return found


def report(found: dict[str, float]) -> dict[str, float]:
    """Add each way's share of the plain rate that bounds it: a copy, an all-gather, a broadcast."""
    bounds = {"export": "all_gather", "push": "broadcast"}
    for way, bound in bounds.items():
        plain = found.get(f"{bound}_gb_s", found["copy_gb_s"])
        if (rate := found.get(f"{way}_gb_s")) is not None:
            found = {**found, f"{way}_over_plain": rate / plain}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder of one that is there already")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        config = settings(options.model, options)
        take_part(config, ranks.join(os.environ, config), options.rounds)
        os._exit(0)  # gloo's threads, at times alive still, would abort the interpreter's end
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or make_folder(Path(temporary), options.layers, options.device)
        found = report(lead(settings(folder, options), options))
    for name, value in found.items():
        print(f"{name:24s} {value:12.4g}")
    if options.out:
        head = {"benchmark": "export_push", "command": command("export_push"), **versions()}
        head |= {"ranks": options.ranks, "backend": options.backend, "layers": options.layers}
        options.out.write_text(json.dumps({**head, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
