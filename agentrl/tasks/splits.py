"""Which bugs, names and numbers each split may use: the held-out ones are never trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from agentrl.tasks.library import all_names, library
from agentrl.tasks.repair import Triple, Wanted, all_triples

TRAINED = ("sft", "train")
SPLITS = (*TRAINED, "held_out", "unseen_sites", "unseen_functions")
UNSEEN_FUNCTIONS, UNSEEN_SITES, HELD_OUT = 0.15, 0.12, 0.4
RESERVED_NAMES = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Bugs by split, and names for training and for the rest."""

    triples: dict[str, tuple[Triple, ...]]
    trained_names: tuple[str, ...]
    reserved_names: tuple[str, ...]


def partition(seed: int, functions: int = 0) -> Partition:
    """Divide functions, then sites, then replacements. Only the rest is trained on.

    `functions`: take so many of the library; 0 takes all.
    held_out: triples never trained on, at sites that are, with another replacement.
    unseen_sites: (function, site) never trained on. unseen_functions: functions never trained on.
    """
    rng = random.Random(f"partition {seed}")
    taken = chosen(functions)
    triples = [triple for triple, _ in all_triples() if triple[0] in taken]
    far = set(rng.sample(taken, round(UNSEEN_FUNCTIONS * len(taken))))
    sites = [site for site in dict.fromkeys(t[:2] for t in triples) if site[0] not in far]
    apart = set(rng.sample(sites, round(UNSEEN_SITES * len(sites))))
    groups: dict[str, list[Triple]] = {name: [] for name in SPLITS[1:]}
    owed = rng.random()
    for site in dict.fromkeys(t[:2] for t in triples):
        here = [triple for triple in triples if triple[:2] == site]
        if site[0] in far:
            groups["unseen_functions"] += here
        elif site in apart:
            groups["unseen_sites"] += here
        else:
            rng.shuffle(here)
            owed += HELD_OUT * len(here) if len(here) > 1 else 0.0
            kept = min(int(owed), len(here) - 1)
            owed -= kept
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


def chosen(functions: int) -> list[str]:
    """Return so many of the library's functions, one of each module before a second of any."""
    modules: dict[str, list[str]] = {}
    for name, template in library().items():
        modules.setdefault(template.module, []).append(name)
    turns = chain.from_iterable(zip_longest(*modules.values()))
    return [name for name in turns if name is not None][: functions or None]


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
