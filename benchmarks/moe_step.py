"""A step of a cut of Qwen3-30B-A3B on one GPU: Megatron, FSDP2, and what they are measured against.

    python -m benchmarks.moe_step [--layers 8] [--tokens 65536] [--side NAME] [--out FILE]

Real widths (128 experts, 8 a token), few layers, random weights, bfloat16. Two pieces of work:
`one`: one sequence of 16,384 tokens, all of them in the loss; `packed`: trajectories of log-normal
length up to 16,384 tokens, a third of them sampled, in micro-batches of 16,384. Timed is forward,
loss and backward of all micro-batches, of each side after its warm-up; for ours the whole step with
clipping and Adam, too. Against: transformers with grouped experts and SDPA, its rows padded, its
rows packed, and one sequence at a time, eager and compiled, its head in compiled chunks over the
rows in the loss only; megatron-core's stock `local` layers, a sequence at a time, where they fit.
MFU counts what the model needs against the matrix rate measured in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.hf_shape import read_shape
from agentrl.training import ranks
from agentrl.training.flops import matrix_rate, step_flops
from agentrl.training.packing import MicroBatch, Sample, pack, padding_share, stack
from agentrl.training.step_loss import Sums, batch_loss
from benchmarks.logprob_loss import GIB, command, row_chunks, versions
from benchmarks.trainer_step import make_samples

BUDGET = 16_384
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "max_position_embeddings": 65_536,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
Work = Callable[[], object]


def described(layers: int) -> dict[str, Any]:
    """Return the config.json of such a model."""
    return {"model_type": "qwen3_moe", "num_hidden_layers": layers, **SHAPE}


def make_model(folder: Path, layers: int, experts: str = "grouped_mm") -> torch.nn.Module:
    """Return a random model in transformers' own classes, on the GPU; write it at `folder`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=layers)
    config._experts_implementation = experts
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: one.detach().cpu() for name, one in model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
    return model.train()


def one_sequence(tokens: int) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        Sample(
            tokens=rng.integers(0, SHAPE["vocab_size"], tokens).astype(np.int32),
            loss_mask=np.ones(tokens, dtype=np.bool_),
            engine_logprobs=np.full(tokens, -11.9, dtype=np.float32),
            advantage=1.0,
            weight=1 / tokens,
        )
    ]


class Transformers:
    """The peer: its own classes, its head in compiled chunks over the rows in the loss."""

    def __init__(self, folder: Path, layers: int, *, is_compiled: bool = False) -> None:
        self.model = make_model(folder, layers)
        self.config = RunConfig().training
        if is_compiled:
            for layer in self.model.model.layers:  # type: ignore[union-attr]
                layer.compile()

    def work(self, batches: list[MicroBatch]) -> Work:
        def run() -> None:
            self.model.zero_grad(set_to_none=True)
            for batch in batches:
                hidden = self.model.model(  # type: ignore[operator]
                    input_ids=batch.tokens.cuda(), use_cache=False, **_positions(batch)
                ).last_hidden_state
                rows = hidden.reshape(-1, hidden.shape[-1])[batch.source.cuda()]
                head = self.model.lm_head.weight
                logprobs = row_chunks(rows, head, batch.targets.cuda())  # type: ignore[arg-type]
                loss = batch_loss(logprobs, logprobs.detach(), batch, self.config, Sums())
                loss.backward()

        return run


def _positions(batch: MicroBatch) -> dict[str, Tensor]:
    if batch.ends is None:
        return {}
    ends = batch.ends.long()
    positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(ends.diff())
    return {"position_ids": positions[None].cuda()}


def settings(folder: Path, **more: object) -> RunConfig:
    config = RunConfig()
    config.model.path = str(folder)
    chosen: dict[str, object] = {"dtype": "bfloat16", "device": "gpu"}
    chosen |= {"packing": "packed", "micro_batch_tokens": BUDGET, "lr": 1e-6, **more}
    for name, value in chosen.items():
        setattr(config.training, name, value)
    return config


@contextmanager
def opened(config: RunConfig) -> Iterator[Any]:
    """One of our back ends, alone in its process group."""
    from agentrl.training.backends import open_megatron
    from agentrl.training.torch_backend import TorchBackend

    with ranks.started(config) as world:
        if config.training.backend == "torch":
            yield TorchBackend(Path(config.model.path), config, world=world)
        else:
            yield open_megatron(config)


def passes(backend: Any, batches: list[MicroBatch]) -> Work:
    """Forward, loss and backward alone, as the peers have them."""

    def run() -> None:
        if hasattr(backend, "layout"):
            backend.backward(batches)
        else:
            backend.optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                backend._backward(batch, Sums())

    return run


class Stock:
    """megatron-core's own `local` layers and loss: no packed rows, experts in a loop."""

    def __init__(self, layers: int) -> None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        from agentrl.hf_shape import Layout
        from agentrl.training.megatron_layers import make_config

        hf = described(layers)
        config = make_config(read_shape(hf), hf, Layout(), torch.bfloat16)
        config.perform_initialization = True
        spec = get_gpt_layer_local_spec(
            num_experts=SHAPE["num_experts"], qk_layernorm=True, normalization="RMSNorm"
        )
        self.model = GPTModel(
            config,
            spec,
            SHAPE["vocab_size"],
            BUDGET,
            position_embedding_type="rope",
            rotary_base=1_000_000,
        ).cuda()

    def work(self, samples: list[Sample]) -> Work:
        rows = [torch.from_numpy(one.tokens.astype(np.int64))[None].cuda() for one in samples]

        def run() -> None:
            self.model.zero_grad(set_to_none=True)
            for tokens in rows:
                length = tokens.shape[1]
                places = torch.arange(length, device="cuda")[None]
                mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
                self.model(tokens, places, mask, labels=tokens.roll(-1)).mean().backward()

        return run


def timed(work: Work, rounds: int, warm: int = 2) -> dict[str, float]:
    """Return the median of `rounds` runs, after `warm` others, and the memory's peak."""
    begun = time.perf_counter()
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return {
        "seconds": statistics.median(times),
        "fastest_s": min(times),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "warm_up_s": warm_s,
    }


class Table:
    def __init__(self, layers: int, rounds: int, out: Path | None) -> None:
        self.layers, self.rounds, self.out = layers, rounds, out
        self.rate = matrix_rate(torch.device("cuda"))
        self.shape = read_shape(described(layers))
        self.found: dict[str, dict[str, Any]] = {}
        if out and out.exists():  # sides that ran before, each in a process of its own
            self.found = json.loads(out.read_bytes())["found"]

    def add(
        self, name: str, samples: list[Sample], work: Work, *, warm: int = 2, **more: float
    ) -> None:
        """Time `work` over `samples` and print its line; what does not fit says so."""
        try:
            seen: dict[str, Any] = timed(work, self.rounds if warm > 1 else 1, warm)
        except torch.OutOfMemoryError as error:
            seen = {"failed": str(error).splitlines()[0]}
            print(f"{name:52s} {seen['failed'][:90]}", flush=True)
        else:
            tokens = sum(len(one.tokens) for one in samples)
            seen["tokens_per_s"] = tokens / seen["seconds"]
            seen["mfu"] = step_flops(self.shape, samples) / seen["seconds"] / self.rate
            print(
                f"{name:52s} {1e3 * seen['seconds']:8.1f} ms {seen['tokens_per_s']:9,.0f} tokens/s"
                f"  MFU {seen['mfu']:.3f}  {seen['peak_gib']:6.1f} GiB  "
                f"warm-up {seen['warm_up_s']:.0f} s",
                flush=True,
            )
        self.found[name] = seen | more
        self.write()

    def write(self) -> None:
        if self.out:
            head: dict[str, object] = {"benchmark": "moe_step", "command": command("moe_step")}
            head |= {**versions(), "layers": self.layers, "matrix_flops": self.rate}
            self.out.write_text(json.dumps({**head, "found": self.found}, indent=1))


OURS: dict[str, dict[str, object]] = {
    "ours megatron": {"backend": "megatron"},
    "ours megatron, recompute": {"backend": "megatron", "recompute": "layers"},
    "ours torch, compiled": {"backend": "torch", "compile": True},
}
PEERS = ("transformers", "transformers, compiled layers")
STOCK = "megatron-core stock local"
SIDES = (*OURS, *PEERS, STOCK)


def run_side(side: str, table: Table, folder: Path, kinds: dict[str, list[Sample]]) -> None:
    if side in OURS:
        run_ours(side, table, folder, kinds)
    elif side in PEERS:
        run_peer(side, table, folder, kinds)
    else:
        with ranks.started(settings(folder, backend="megatron")):
            _stock(table, kinds["packed"])


def run_ours(side: str, table: Table, folder: Path, kinds: dict[str, list[Sample]]) -> None:
    with opened(settings(folder, **OURS[side])) as backend:
        for kind, samples in kinds.items():
            batches = pack(samples, BUDGET, is_packed=True)
            table.add(f"{side} | {kind}", samples, passes(backend, batches))
        table.add(f"{side} | packed, whole step", samples, lambda: backend.train_step(batches))


def run_peer(side: str, table: Table, folder: Path, kinds: dict[str, list[Sample]]) -> None:
    peer = Transformers(folder, table.layers, is_compiled="compiled" in side)
    table.add(f"{side} | one", kinds["one"], peer.work([stack(kinds["one"])]))
    samples = kinds["packed"]
    layouts = {
        "padded rows": pack(samples, BUDGET),
        "a sequence at a time": [stack([one]) for one in samples],
        "packed rows": pack(samples, BUDGET, is_packed=True),
    }
    for layout, batches in layouts.items():
        share = {"padding": padding_share(batches)}
        table.add(f"{side} | packed, {layout}", samples, peer.work(batches), **share)


def _stock(table: Table, samples: list[Sample]) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(0)
    peer = Stock(table.layers)
    short = [one for one in samples if len(one.tokens) <= 4096]
    name = f"{STOCK} | sequences up to 4,096, all tokens in the loss"
    table.add(name, short, peer.work(short), warm=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help="one of them; else each in its own process")
    parser.add_argument("--scratch", type=Path, help="folder for the model, kept")
    parser.add_argument("--out", type=Path, help="where sides add their results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.scratch or Path(temporary) / "model"
        if not (folder / "config.json").is_file():
            make_model(folder, options.layers)
            gc.collect()
            torch.cuda.empty_cache()
        if options.side is None:
            for side in SIDES:
                more = ["--side", side, "--scratch", str(folder)]
                subprocess.run([*sys.orig_argv, *more], check=False)
            return
        kinds = {"one": one_sequence(BUDGET), "packed": make_samples(options.tokens)}
        table = Table(options.layers, options.rounds, options.out)
        print(f"{len(kinds['packed'])} trajectories; {table.rate / 1e12:.0f} TFLOP/s")
        run_side(options.side, table, folder, kinds)


if __name__ == "__main__":
    main()
