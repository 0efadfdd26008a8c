"""A layer of 128 experts at Qwen3-30B-A3B's widths: grouped products, beside raw ones and a loop.

    python -m benchmarks.experts_layer [--tokens 16384] [--rounds 20] [--out FILE]

Needs a GPU and megatron-core. `raw` is the two grouped products alone, forward and backward, on
rows that lie by expert already; `experts` adds gate and chances between them (GroupedExperts);
`mixture` adds the router and the way of the tokens there and back (Mixture); `loop` is one matrix
product an expert, as megatron-core's own layers without Transformer Engine have it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.hf_shape import Layout, read_shape
from agentrl.training import ranks
from benchmarks.logprob_loss import command, median_ms, versions
from benchmarks.moe_step import SHAPE, described, settings


def draw(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def differentiated(forward: Callable[..., Tensor], *given: Tensor) -> Callable[[], object]:
    """Return work that runs `forward` and its backward under a random gradient."""
    inputs = [one.detach().requires_grad_() for one in given]
    slope = torch.randn_like(forward(*inputs).detach())

    def run() -> object:
        return torch.autograd.grad(forward(*inputs), inputs, slope)

    return run


def loop(rows: Tensor, counts: Tensor, chances: Tensor, into: Tensor, out: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    shares = chances.split(counts.tolist())
    found = []
    for expert, (part, share) in enumerate(zip(parts, shares, strict=True)):
        gate, up = (part @ into[expert].T).chunk(2, -1)
        found.append((F.silu(gate) * up * share[:, None]).to(part.dtype) @ out[expert].T)
    return torch.cat(found)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    from agentrl.training.grouped_experts import Mixture
    from agentrl.training.megatron_layers import make_config

    hf = described(1)
    mixture = Mixture(make_config(read_shape(hf), hf, Layout(), torch.bfloat16)).cuda()
    experts = mixture.experts
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    hidden = draw(tokens, SHAPE["hidden_size"])
    _, is_chosen = mixture.router(hidden[:, None])
    counts = is_chosen.sum(0)
    rows = draw(int(counts.sum()), SHAPE["hidden_size"])
    shares = torch.rand(len(rows), device="cuda")
    ends = counts.cumsum(0).to(torch.int32)
    into, out = experts.linear_fc1.detach(), experts.linear_fc2.detach()
    inner = draw(len(rows), SHAPE["moe_intermediate_size"])

    def first(rows: Tensor, into: Tensor) -> Tensor:
        return torch._grouped_mm(rows, into.mT, offs=ends)

    def layer(rows: Tensor, shares: Tensor) -> Tensor:
        return experts(rows, counts, shares)  # type: ignore[no-any-return]

    weights = [experts.linear_fc1, experts.linear_fc2]
    raw = [differentiated(first, rows, into), differentiated(first, inner, out)]
    found = {
        "raw_ms": sum(median_ms(work, rounds) for work in raw),
        "experts_ms": median_ms(with_weights(layer, weights, rows, shares), rounds),
        "mixture_ms": median_ms(
            with_weights(lambda one: mixture(one[:, None])[0], [*mixture.parameters()], hidden),
            rounds,
        ),
    }
    looped = differentiated(
        lambda rows, shares, into, out: loop(rows, counts, shares, into, out),
        rows,
        shares,
        into,
        out,
    )
    return found | {"loop_ms": median_ms(looped, max(3, rounds // 5))}


def with_weights(
    forward: Callable[..., Tensor], weights: list[Tensor], *given: Tensor
) -> Callable[[], object]:
    inputs = [one.detach().requires_grad_() for one in given]
    slope = torch.randn_like(forward(*inputs).detach())

    def run() -> object:
        return torch.autograd.grad(forward(*inputs), [*inputs, *weights], slope)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ranks.started(settings(Path(), backend="megatron")):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
        model_parallel_cuda_manual_seed(0)
        found = measure(options.tokens, options.rounds)
        parallel_state.destroy_model_parallel()
    found["raw_over_experts"] = found["raw_ms"] / found["experts_ms"]
    found["loop_over_experts"] = found["loop_ms"] / found["experts_ms"]
    print(json.dumps(found, indent=1))
    if options.out:
        head: dict[str, object] = {"benchmark": "experts_layer", "tokens": options.tokens}
        head |= {"command": command("experts_layer"), **versions()}
        options.out.write_text(json.dumps({**head, "found": found}, indent=1))


if __name__ == "__main__":
    main()
