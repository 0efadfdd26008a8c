"""How evenly a step's trajectories come to lie on the data-parallel ranks, against first-fit.

    python -m benchmarks.packing [--groups 32 64] [--ranks 8] [--budget 65536] [--out FILE]

Drawn are `--steps` steps of groups of 8 attempts: turns log-normal about a median of 8, at most
100; a turn is 150 tokens of reply and an output of log-normal length (median 350); all cut at
65,536 tokens. The spread of turns and the lengths are assumptions, the median is of real runs.
Both sides get the same steps and token budget:
first-fit: unsorted, into the first micro-batch with room, dealt to the ranks in turn;
padded: ours, `packing=padded`; packed: ours, `packing=packed`.
`padding` is the share of computed tokens that are none; `idle` the share of all ranks' time in
which they wait for the one with the most, 1 − mean/most, counted in tokens and in work (attention
grows with the square of a length: packing.ATTENTION_TOKENS). `bound`: idle work that no dealing
of whole trajectories can avoid, for one of them alone is more than a rank's share.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agentrl.training.packing import MicroBatch, Sample, deal, join, pack, padding_share, stack
from benchmarks.logprob_loss import command, versions

ATTEMPTS, LONGEST = 8, 65_536
Hands = list[list[MicroBatch]]
Side = Callable[[list[Sample], int, int], Hands]


def draw_lengths(rng: np.random.Generator, count: int) -> list[int]:
    """Return the lengths of trajectories, tokens."""
    turns = np.clip(rng.lognormal(np.log(8), 0.9, count).round(), 1, 100).astype(int)
    tokens = [
        2000 + sum(150 + rng.lognormal(np.log(350), 1.0, number)) for number in turns.tolist()
    ]
    return [int(min(LONGEST, one)) for one in tokens]


def sample(length: int) -> Sample:
    return Sample(
        tokens=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, np.bool_),
        engine_logprobs=np.zeros(length, np.float32),
        advantage=0.0,
    )


def first_fit(samples: list[Sample], budget: int, ranks: int) -> Hands:
    bins: list[list[Sample]] = []
    room: list[int] = []
    for one in samples:
        size = len(one.tokens)
        at = next((place for place, free in enumerate(room) if free >= size), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(budget)
        bins[at].append(one)
        room[at] -= size
    return [[join(rows) for rows in bins[rank::ranks]] for rank in range(ranks)]


def packed(samples: list[Sample], budget: int, ranks: int) -> Hands:
    return deal(pack(samples, budget, is_packed=True, ranks=ranks), ranks)


def padded(samples: list[Sample], budget: int, ranks: int) -> Hands:
    return deal(pack(samples, budget), ranks)


SIDES: dict[str, Side] = {"first-fit": first_fit, "padded": padded, "packed": packed}


def idle(loads: Sequence[float]) -> float:
    return 1 - statistics.mean(loads) / max(loads)


def judge(hands: Hands) -> dict[str, float]:
    batches = [batch for hand in hands for batch in hand]
    tokens = idle([sum(batch.tokens.numel() for batch in hand) for hand in hands])
    padding = padding_share(batches)
    return {
        "padding": padding,
        "idle_tokens": tokens,
        "padding_and_idle": padding + tokens,
        "idle_work": idle([sum(batch.work for batch in hand) for hand in hands]),
        "micro_batches": len(batches),
    }


def bound(samples: Sequence[Sample], ranks: int) -> float:
    works = [stack([one]).work for one in samples]
    return max(0.0, 1 - sum(works) / ranks / max(works))


def measure(groups: int, ranks: int, budget: int, steps: int) -> dict[str, dict[str, float]]:
    """Return each side's means over the steps, and the worst step's `padding_and_idle`."""
    rng = np.random.default_rng(0)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(steps):
        samples = [sample(length) for length in draw_lengths(rng, groups * ATTEMPTS)]
        least = bound(samples, ranks)
        for name, side in SIDES.items():
            seen[name].append({**judge(side(samples, budget, ranks)), "bound": least})
    return {
        name: {key: statistics.mean(one[key] for one in found) for key in found[0]}
        | {"worst": max(one["padding_and_idle"] for one in found)}
        for name, found in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--ranks", type=int, default=8, help="of data parallelism")
    parser.add_argument("--budget", type=int, default=LONGEST, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lengths = draw_lengths(np.random.default_rng(1), 20_000)
    spread = {f"p{at}": float(np.percentile(lengths, at)) for at in (5, 50, 90, 99, 100)}
    print("lengths, tokens:", {name: round(value) for name, value in spread.items()})
    found: dict[str, object] = {}
    for groups in options.groups:
        found[str(groups)] = sides = measure(groups, options.ranks, options.budget, options.steps)
        for name, one in sides.items():
            told = "  ".join(f"{key} {value:.4g}" for key, value in one.items())
            print(f"{groups * ATTEMPTS:4d} trajectories, {name:10s} {told}")
    if options.out:
        head = {"benchmark": "packing", "command": command("packing"), **versions()}
        head |= {"ranks": options.ranks, "budget": options.budget, "lengths": spread}
        options.out.write_text(json.dumps({**head, "groups": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
