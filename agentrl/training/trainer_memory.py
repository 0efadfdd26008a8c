"""What a rank of the trainer holds of its model all the time: weights, gradients and optimizer.

Counted from config.json and the cut, without torch, up to the padding of buffers. What a step takes
for itself comes on top: activations, the head's logits, layers that are gathered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from agentrl.config import TrainingConfig
from agentrl.hf_shape import Layout, ModelShape
from agentrl.training.hf_tables import VOCABULARY_MULTIPLE, Place, places, shapes_of

FLOAT32 = 4
MOMENTS = 8
"""Adam's two, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Of the whole model, and of the rank that holds most."""

    parameters: int
    rank_parameters: int
    rank_bytes: int


def held(shape: ModelShape, layout: Layout, training: TrainingConfig) -> Held:
    """Return what the ranks of `training` hold of a model of this shape."""
    whole = sum(map(prod, _tensors(shape)))
    if training.backend == "torch":  # float32 throughout; FSDP2 cuts all of it
        each = FLOAT32 + FLOAT32 + MOMENTS + (FLOAT32 if training.kl_coef else 0)
        mine = -(-whole // training.ranks)
        return Held(parameters=whole, rank_parameters=mine, rank_bytes=mine * each)
    ranks = training.ranks // layout.pp
    is_half = training.dtype == "bfloat16"
    weight, optimizer = (2, FLOAT32 + MOMENTS) if is_half else (FLOAT32, MOMENTS)
    dense, experts = _by_stage(shape, layout)
    held_of = {
        stage: dense[stage] * (weight + FLOAT32 + optimizer * layout.tp / ranks)
        + experts[stage] * (weight + FLOAT32 + optimizer * layout.ep / ranks)
        for stage in range(layout.pp)
    }
    most = max(held_of, key=lambda stage: held_of[stage])
    return Held(
        parameters=whole,
        rank_parameters=dense[most] + experts[most],
        rank_bytes=round(held_of[most]),
    )


def _tensors(shape: ModelShape) -> list[tuple[int, ...]]:
    return [size for place in places(shape, Layout()) for size in shapes_of(place, shape)]


def _by_stage(shape: ModelShape, layout: Layout) -> tuple[Counter[int], Counter[int]]:
    """Return what one rank of each pipeline stage holds: outside of experts, and in them."""
    dense: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    for place in places(shape, layout):
        size = _size(place, shape, layout.tp)
        for stage in place.stages:
            if not place.rule.is_expert:
                dense[stage] += size
            elif place.ep_rank == 0:
                experts[stage] += size
    return dense, experts


def _size(place: Place, shape: ModelShape, tp: int) -> int:
    """Return how many elements of a place one rank holds."""
    cut = place.rule.cut
    if cut == "vocabulary":
        return (
            -(-shape.vocabulary // (VOCABULARY_MULTIPLE * tp)) * VOCABULARY_MULTIPLE * shape.hidden
        )
    whole = sum(map(prod, shapes_of(place, shape)))
    return whole if cut == "copy" or place.rule.is_expert else whole // tp
