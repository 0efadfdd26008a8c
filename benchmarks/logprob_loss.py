"""The head at a real vocabulary: seconds, memory and error of its log-probabilities and gradients.

    python -m benchmarks.logprob_loss [--rows 4096 16384 32768] [--rounds 20] [--out FILE]

Needs a GPU. Ours (agentrl.training.head, with entropy) beside the naive path, plain cross-entropy,
compiled row chunks under checkpointing, liger-kernel and cut-cross-entropy where they are
installed, and, around each, the floor: the bare products of the same size, one forward, three in
all.
Every peer gets random gradients per token, not a sum's ones. Times are medians; memory is the
peak above the inputs; errors are against float64 on 256 rows (log-probabilities, gradient of the
rows) and, at the smallest size, on the whole gradient of the weight.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.training.head import Tile, chosen_logprobs

HIDDEN, VOCABULARY = 2048, 151_936
EXACT_ROWS = 256
GIB = 2**30
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor


def make_inputs(rows: int) -> Inputs:
    torch.manual_seed(rows)
    device = "cuda"
    hidden = torch.randn(rows, HIDDEN, device=device, dtype=torch.bfloat16)
    weight = torch.randn(VOCABULARY, HIDDEN, device=device, dtype=torch.bfloat16) * 0.02
    return Inputs(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        targets=torch.randint(0, VOCABULARY, (rows,), device=device),
        upstream=torch.randn(rows, device=device),
    )


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


def row_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    parts = [
        checkpoint(_compiled_naive, rows, weight, chosen, use_reentrant=False)
        for rows, chosen in zip(hidden.split(2048), targets.split(2048), strict=True)
    ]
    return torch.cat(parts)


_compiled_naive = torch.compile(naive)


def ours(tile: Tile) -> LogProbs:
    def work(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chosen_logprobs(hidden, weight, targets, tile=tile)[0]

    return work


def peers() -> Iterator[tuple[str, LogProbs]]:
    yield "naive", naive
    yield "cross_entropy", cross_entropy
    yield "compiled 2048-row chunks, checkpointed", row_chunks
    try:
        from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

        def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            return _ChunkedSelectiveLogProbFunction.apply(hidden, weight, targets, None, 1.0, 4096)

        yield "liger-kernel selective log-prob", liger
    except ImportError as error:
        print(f"liger-kernel left out: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError as error:
        print(f"cut-cross-entropy left out: {error}")
        return

    def cut(filter_eps: str | None) -> LogProbs:
        def work(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = linear_cross_entropy(
                hidden, weight, targets, reduction="none", filter_eps=filter_eps
            )
            return -loss

        return work

    yield "cut-cross-entropy, exact", cut(None)
    yield "cut-cross-entropy, gradients filtered", cut("high")


def median_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the median of its time on a GPU that, as in a step, has more to do before it."""
    for _ in range(3):
        work()
    busy = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):
            busy @ busy
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def floor(given: Inputs, rounds: int) -> tuple[float, float]:
    """Return ms of one product, and of the three that exact gradients cannot do without."""
    hidden, weight = given.hidden.detach(), given.weight.detach()
    logits = torch.empty(len(hidden), VOCABULARY, device="cuda", dtype=torch.bfloat16)

    def three() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.T, hidden)

    one = median_ms(lambda: torch.mm(hidden, weight.T, out=logits), rounds)
    return one, median_ms(three, rounds)


def measure(function: LogProbs, given: Inputs, rounds: int) -> dict[str, float]:
    def forward() -> Tensor:
        with torch.no_grad():
            return function(given.hidden, given.weight, given.targets)

    def both() -> tuple[Tensor, ...]:
        logprobs = function(given.hidden, given.weight, given.targets)
        return torch.autograd.grad(logprobs, (given.hidden, given.weight), given.upstream)

    forward()
    both()
    memory = {}
    for name, work in (("forward_gib", forward), ("both_gib", both)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / GIB
    return {
        "forward_ms": median_ms(forward, rounds),
        "both_ms": median_ms(both, rounds),
        **memory,
        **errors(given, forward(), *both()),
    }


def errors(
    given: Inputs, logprobs: Tensor, hidden_grad: Tensor, weight_grad: Tensor
) -> dict[str, float]:
    hidden = given.hidden.detach()[:EXACT_ROWS].double().requires_grad_()
    targets = given.targets[:EXACT_ROWS]
    weight = given.weight.detach().double()
    log_p = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None]).squeeze(1)
    (wanted,) = torch.autograd.grad(log_p, hidden, given.upstream[:EXACT_ROWS].double())
    found = {
        "logprob_error": float((logprobs[:EXACT_ROWS] - log_p.detach()).abs().max()),
        "hidden_grad_error": relative(hidden_grad[:EXACT_ROWS], wanted),
    }
    if len(given.hidden) <= 4096:
        found["weight_grad_error"] = relative(weight_grad, exact_weight_grad(given, weight))
    return found


def exact_weight_grad(given: Inputs, weight: Tensor) -> Tensor:
    total = torch.zeros_like(weight)
    for start in range(0, len(given.hidden), 1024):
        rows = slice(start, start + 1024)
        hidden = given.hidden.detach()[rows].double()
        slope = torch.softmax(hidden @ weight.T, -1).neg_()
        slope[torch.arange(len(hidden)), given.targets[rows]] += 1
        total += (slope * given.upstream[rows, None]).T @ hidden
    return total


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16_384, 32_768])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--tiles",
        nargs="*",
        default=[],
        help="more of ours, WHOLE_ROWS:WHOLE_LOGITS:ROWS:LOGITS",
    )
    parser.add_argument("--only", default="", help="of the peers, those whose name has this in it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tiles = [Tile(), *map(_tile, options.tiles)]
    rivals = [
        *((f"ours {_text(tile)}", ours(tile)) for tile in tiles),
        *((name, peer) for name, peer in peers() if options.only in name),
    ]
    result: dict[str, object] = {
        "benchmark": "logprob_loss",
        "command": command("logprob_loss"),
        **versions(),
    }
    result["sizes"] = [compare(rows, rivals, options.rounds) for rows in options.rows]
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


def compare(rows: int, rivals: list[tuple[str, LogProbs]], rounds: int) -> dict[str, object]:
    given = make_inputs(rows)
    print(f"\nrows {rows}")
    found: dict[str, dict[str, float]] = {}
    for name, function in rivals:
        torch.cuda.empty_cache()
        before = floor(given, rounds)
        try:
            seen = measure(function, given, rounds)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            print(f"{name:40s} {str(error).splitlines()[0][:100]}")
            continue
        after = floor(given, rounds)
        found[name] = seen | over_floor(seen, before, after)
        seen = found[name]
        print(
            f"{name:40s} {seen['forward_ms']:7.1f} ms {seen['forward_over_floor']:5.2f}x  "
            f"{seen['both_ms']:7.1f} ms {seen['both_over_floor']:5.2f}x  {seen['both_gib']:6.2f} "
            f"GiB  errors {seen['logprob_error']:.1e} {seen['hidden_grad_error']:.1e} "
            f"{seen.get('weight_grad_error', float('nan')):.1e}",
            flush=True,
        )
    return {"rows": rows, "found": found}


def over_floor(
    seen: dict[str, float], before: tuple[float, float], after: tuple[float, float]
) -> dict[str, float]:
    """Return the floors of just before and after, whose mean is the one at its time, and ratios.

    A GPU's clock follows its load and heat: a floor of a minute ago is another's.
    """
    one, three = ((first + last) / 2 for first, last in zip(before, after, strict=True))
    return {
        "floor_forward_ms": one,
        "floor_both_ms": three,
        "forward_over_floor": seen["forward_ms"] / one,
        "both_over_floor": seen["both_ms"] / three,
    }


def _tile(text: str) -> Tile:
    names = (field.name for field in fields(Tile))
    return Tile(**dict(zip(names, map(int, text.split(":")), strict=True)))


def _text(tile: Tile) -> str:
    return ":".join(map(str, astuple(tile)))


def command(name: str) -> str:
    return " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])


def versions() -> dict[str, object]:
    found: dict[str, object] = {"date": datetime.date.today().isoformat()}
    found["python"] = platform.python_version()
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in ("torch", "triton", "liger-kernel", "cut-cross-entropy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
