"""Which bugs, names and numbers each split may use: the held-out ones are never trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.tasks.library import all_names
from agentrl.tasks.repair import Triple, Wanted, all_triples

TRAINED = ("sft", "train")
SPLITS = (*TRAINED, "held_out", "unseen_sites", "unseen_functions")
UNSEEN_FUNCTIONS, UNSEEN_SITES, HELD_OUT = 0.15, 0.12, 0.5
RESERVED_NAMES = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Bugs by split, and names for training and for the rest."""

    triples: dict[str, tuple[Triple, ...]]
    trained_names: tuple[str, ...]
    reserved_names: tuple[str, ...]


def partition(seed: int) -> Partition:
    """Divide functions, then sites, then replacements. Only the rest is trained on.

    held_out: triples never trained on, at sites that are, with another replacement.
    unseen_sites: (function, site) never trained on. unseen_functions: functions never trained on.
    """
    rng = random.Random(f"partition {seed}")
    triples = [triple for triple, _ in all_triples()]
    functions = list(dict.fromkeys(function for function, _, _ in triples))
    far = set(rng.sample(functions, round(UNSEEN_FUNCTIONS * len(functions))))
    sites = [site for site in dict.fromkeys(t[:2] for t in triples) if site[0] not in far]
    apart = set(rng.sample(sites, round(UNSEEN_SITES * len(sites))))
    groups: dict[str, list[Triple]] = {name: [] for name in SPLITS[1:]}
    for site in dict.fromkeys(t[:2] for t in triples):
        here = [triple for triple in triples if triple[:2] == site]
        if site[0] in far:
            groups["unseen_functions"] += here
        elif site in apart:
            groups["unseen_sites"] += here
        else:
            rng.shuffle(here)
            kept = sum(rng.random() < HELD_OUT * len(here) / (len(here) - 1) for _ in here[1:])
            groups["held_out"] += here[:kept]
            groups["train"] += here[kept:]
    names = list(all_names())
    rng.shuffle(names)
    cut = round(RESERVED_NAMES * len(names))
    return Partition(
        triples={name: tuple(some) for name, some in groups.items()},
        reserved_names=tuple(names[:cut]),
        trained_names=tuple(names[cut:]),
    )


def wanted(part: Partition, split: str, functions: int, rng: random.Random) -> Iterator[Wanted]:
    """Yield bugs without end.

    To train on: a function, one of its sites, then a replacement, each evenly. To evaluate on:
    every bug once, shuffled, before any comes again, for an interval counts different bugs.
    """
    trained = split in TRAINED
    triples = part.triples["train" if trained else split]
    for triple in _by_function(triples, rng) if trained else _by_bug(triples, rng):
        yield Wanted(
            triple=triple,
            names=part.trained_names if trained else part.reserved_names,
            is_reserved=not trained,
            functions=functions,
        )


def _by_function(triples: Sequence[Triple], rng: random.Random) -> Iterator[Triple]:
    tree: dict[str, dict[int, list[Triple]]] = {}
    for triple in triples:
        tree.setdefault(triple[0], {}).setdefault(triple[1], []).append(triple)
    while True:
        sites = tree[rng.choice(list(tree))]
        yield rng.choice(sites[rng.choice(list(sites))])


def _by_bug(triples: Sequence[Triple], rng: random.Random) -> Iterator[Triple]:
    while True:
        yield from rng.sample(triples, len(triples))
