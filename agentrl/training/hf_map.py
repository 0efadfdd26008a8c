"""Hugging Face's tensors into Megatron's and back, bit for bit, by the tables.

fuse: Hugging Face's tensors of a rule → Megatron's whole one       unfuse: back
split: Megatron's whole one → the tensor-parallel ranks' parts      join: back
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.hf_shape import ModelShape
from agentrl.training.hf_tables import VOCABULARY_MULTIPLE, Place, shapes_of


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise ConfigError for a tensor of another shape than the config asks for."""
    if tuple(found) != tuple(wanted):
        raise ConfigError(
            f"{name} is {list(found)} in the weights and {list(wanted)} by config.json: "
            "the two are not of one model"
        )


def fuse(place: Place, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Return Megatron's whole tensor. Raises ConfigError naming a tensor of another shape."""
    for name, tensor, wanted in zip(place.hf, tensors, shapes_of(place, shape), strict=True):
        check_shape(name, tensor.shape, wanted)
    if place.rule.cut == "qkv":
        groups = [one.view(shape.kv_heads, -1, shape.hidden) for one in tensors]
        return torch.cat(groups, 1).flatten(0, 1)
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def unfuse(place: Place, whole: Tensor, shape: ModelShape) -> list[Tensor]:
    """Return the Hugging Face tensors that `whole` holds, in the order of the place's names."""
    if place.rule.cut == "gated":
        return list(whole.chunk(2))
    if place.rule.cut != "qkv":
        return [whole]
    per_group = shape.heads // shape.kv_heads
    groups = whole.view(shape.kv_heads, (per_group + 2) * shape.head_dim, shape.hidden)
    sizes = [per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    return [part.flatten(0, 1) for part in torch.split(groups, sizes, 1)]


def split(place: Place, whole: Tensor, tp: int) -> list[Tensor]:
    """Return each tensor-parallel rank's part; experts are not cut (expert tensor parallel 1)."""
    cut = place.rule.cut
    if place.rule.is_expert or cut == "copy":
        return [whole]
    if cut == "vocabulary":
        missing = -len(whole) % (VOCABULARY_MULTIPLE * tp)
        return list(torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]).chunk(tp))
    if cut == "gated":
        gate, up = (part.chunk(tp) for part in whole.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]
    return list(whole.chunk(tp, 1 if cut == "columns" else 0))


def join(place: Place, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Return the whole tensor that `split` cut; the vocabulary's padding is left out."""
    cut = place.rule.cut
    if place.rule.is_expert or cut == "copy":
        return parts[0]
    if cut == "vocabulary":
        return torch.cat(list(parts))[: shape.vocabulary]
    if cut == "gated":
        pairs = [part.chunk(2) for part in parts]
        return torch.cat([torch.cat([pair[half] for pair in pairs]) for half in (0, 1)])
    return torch.cat(list(parts), 1 if cut == "columns" else 0)
