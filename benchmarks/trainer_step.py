"""A TorchBackend step in bfloat16 on one GPU: tokens a second and model FLOPs utilisation.

    python -m benchmarks.trainer_step [--tokens 65536] [--budget 16384] [--rounds 5] [--out FILE]

A random Qwen3 of 0.6 B parameters in its real shape; trajectories of log-normal length up to 16,384
tokens, a third of them sampled. One step is all of them: forward, loss, backward, clip and AdamW.
First as the trainer was: padded rows, whole logits, autocast. Then packed rows, tiled head, FSDP2's
mixed precision; with compiled layers; with recompute. MFU counts what the model needs (recompute
and padding are not work) against the matrix rate measured here, in the same process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from agentrl.config import RunConfig
from agentrl.hf_shape import read_shape
from agentrl.training import ranks
from agentrl.training.flops import matrix_rate, step_flops
from agentrl.training.packing import MicroBatch, Sample, pack, padding_share
from agentrl.training.torch_backend import TorchBackend
from benchmarks.logprob_loss import GIB, command, versions

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 28, 1024, 3072, 16, 8, 128, 151_936
VARIANTS: dict[str, dict[str, object]] = {
    "padded, whole logits, autocast": {"packing": "padded", "head_tiles_from": 0, "is_plain": True},
    "padded, tiled head": {"packing": "padded"},
    "packed, tiled head": {"packing": "packed"},
    "packed, tiled head, compiled": {"packing": "packed", "compile": True},
    "packed, tiled head, compiled, recompute": {
        "packing": "packed",
        "compile": True,
        "recompute": "layers",
    },
}


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def make_samples(tokens: int) -> list[Sample]:
    """Return trajectories of median 2,500 tokens, with alternating thirds of them sampled."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    while (room := tokens - sum(len(one.tokens) for one in samples)) > 0:
        length = int(min(room, 16_384, max(64, rng.lognormal(np.log(2500), 0.9))))
        mask = np.arange(length) // 100 % 3 == 2
        samples.append(
            Sample(
                tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                engine_logprobs=np.where(mask, -11.9, 0).astype(np.float32),
                advantage=float(rng.normal()),
                weight=3 / tokens,
            )
        )
    return samples


def measure(
    folder: Path, variant: dict[str, object], samples: list[Sample], budget: int, rounds: int
) -> dict[str, float]:
    config = RunConfig()
    config.model.path = str(folder)
    config.training.dtype, config.training.device = "bfloat16", "gpu"
    is_plain = variant.pop("is_plain", False)
    for name, value in variant.items():
        setattr(config.training, name, value)
    with ranks.started(config) as world:
        if is_plain:
            world = ranks.World(device=world.device)
        backend = TorchBackend(folder, config, world=world)
        batches = pack(samples, budget, is_packed=config.training.packing == "packed")
        begun = time.perf_counter()
        for _ in range(2):
            backend.train_step(batches)
        warm_s = time.perf_counter() - begun
        torch.cuda.reset_peak_memory_stats()
        times = [timed(backend, batches) for _ in range(rounds)]
        peak = torch.cuda.max_memory_allocated() / GIB
        loss = backend.train_step(batches)["entropy"]
    del backend
    torch.cuda.empty_cache()
    return {
        "seconds": float(np.median(times)),
        "peak_gib": peak,
        "padding": padding_share(batches),
        "micro_batches": len(batches),
        "warm_up_s": warm_s,
        "entropy": loss,
    }


def timed(backend: TorchBackend, batches: list[MicroBatch]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    backend.train_step(batches)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples = make_samples(options.tokens)
    rate = matrix_rate(torch.device("cuda"))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        work = step_flops(read_shape(json.loads((model / "config.json").read_bytes())), samples)
        print(f"{len(samples)} trajectories, {work / 1e12:.0f} TFLOP; {rate / 1e12:.0f} TFLOP/s")
        for name, variant in VARIANTS.items():
            if options.only not in name:
                continue
            seen = measure(model, dict(variant), samples, options.budget, options.rounds)
            seen["tokens_per_s"] = options.tokens / seen["seconds"]
            seen["mfu"] = work / seen["seconds"] / rate
            found[name] = seen
            print(
                f"{name:42s} {seen['seconds']:7.3f} s {seen['tokens_per_s']:9,.0f} tokens/s  MFU "
                f"{seen['mfu']:.2f}  {seen['peak_gib']:6.1f} GiB  padding {seen['padding']:.2f}  "
                f"warm-up {seen['warm_up_s']:.0f} s",
                flush=True,
            )
    if options.out:
        head: dict[str, object] = {
            "benchmark": "trainer_step",
            "command": command("trainer_step"),
            **versions(),
        }
        head |= {"matrix_flops": rate, "step_flops": work, "trajectories": len(samples)}
        options.out.write_text(json.dumps({**head, "found": found}, indent=1))


if __name__ == "__main__":
    main()
