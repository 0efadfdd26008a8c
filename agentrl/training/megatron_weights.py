"""A Megatron model's tensors by their Hugging Face names, over its ranks: read, gathered, set.

One place of the map at a time, so that never more than one whole tensor is in the way. Every rank
makes each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn

from agentrl.errors import CheckpointError
from agentrl.hf_shape import Layout, ModelShape
from agentrl.training.backend import check_tensor
from agentrl.training.hf_map import fuse, join, split, unfuse
from agentrl.training.hf_tables import HEAD, Place, places, shapes_of
from agentrl.training.megatron_stages import stage, told_by
from agentrl.training.megatron_state import WEIGHT, OptimizerShards
from agentrl.training.weight_files import WeightFiles, check_finite


class MegatronWeights:
    """This rank's parameters by Megatron's names, and the way between them and whole tensors."""

    shards: OptimizerShards
    """Set once there is an optimizer."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shape: ModelShape, layout: Layout
    ) -> None:
        self.parameters, self.shape, self.layout = parameters, shape, layout
        first = next(iter(parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        self._places = tuple(places(shape, layout))  # made once: a large mixture has 12,000
        self._runs = [tuple(run) for _, run in itertools.groupby(self._places, _run_of)]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read this rank's part of a Hugging Face folder, a tensor at a time."""
        files = WeightFiles(folder)
        for place in self._places:
            if self._has(place):
                whole = fuse(place, [files.get(name) for name in place.hf], self.shape)
                self._view(place).copy_(self._mine_of(split(place, whole, self.layout.tp)))
        check_finite(self.parameters.items(), folder)

    def named(self, kind: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, or a kind of the optimizer's state in float32, whole, on every rank.

        kind: WEIGHT, `exp_avg` or `exp_avg_sq`; empty: the weights that the model computes with.
        """
        dtype = torch.float32 if kind else self.dtype
        for run in self._runs:
            place = run[0]
            if self.shape.is_tied and place.name == HEAD:
                continue  # the last stage's copy of the embedding
            if place.rule.is_expert and not kind:
                yield from self._all_experts(run)
                continue
            for one in run:
                yield from self._one(one, kind, dtype)

    def _one(self, place: Place, kind: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        tensors: Sequence[Tensor | None] = [None] * len(place.hf)
        if stage() in place.stages:
            parts = self._gathered(place, self._part(place, kind))
            tensors = unfuse(place, join(place, parts, self.shape), self.shape)
        shapes, owner = shapes_of(place, self.shape), place.stages[0]
        for name, tensor, shape in zip(place.hf, tensors, shapes, strict=True):
            yield name, told_by(owner, tensor, shape, dtype=dtype, device=self.device)

    @torch.no_grad()
    def take(self, kind: str, source: Mapping[str, Tensor] | None) -> None:
        """Set one kind from rank 0's whole tensors; the other ranks give None.

        Raises CheckpointError for tensors of another model.
        """
        if source is not None:
            wanted = {name for place in self._places for name in place.hf}
            if odd := sorted(wanted ^ source.keys()):
                names = ", ".join(odd[:3])
                raise CheckpointError(f"checkpoint is of another model: {names} differ")
        for place in self._places:
            tensors = [
                self._told(name, source, wanted_shape)
                for name, wanted_shape in zip(place.hf, shapes_of(place, self.shape), strict=True)
            ]
            if not self._has(place):
                continue
            part = self._mine_of(split(place, fuse(place, tensors, self.shape), self.layout.tp))
            if kind == WEIGHT:
                self._view(place).copy_(part)
            parameter, first, _ = self._slot(place)
            self.shards.put(parameter, kind, first, part.reshape(-1))

    def _has(self, place: Place) -> bool:
        rank = parallel_state.get_expert_model_parallel_rank()
        return stage() in place.stages and (not place.rule.is_expert or place.ep_rank == rank)

    def _mine_of(self, parts: Sequence[Tensor]) -> Tensor:
        rank = parallel_state.get_tensor_model_parallel_rank() if len(parts) > 1 else 0
        return parts[rank]

    def _told(
        self, name: str, source: Mapping[str, Tensor] | None, shape: tuple[int, ...]
    ) -> Tensor:
        """Return rank 0's tensor on every rank, float32."""
        tensor = torch.empty(shape) if source is None else source[name]
        check_tensor(name, tensor, shape)
        told = tensor.to(self.device, torch.float32).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(told, 0)
        return told

    def _slot(self, place: Place) -> tuple[nn.Parameter, int, torch.Size]:
        """Return the parameter that holds a place, from which element on, and its shape there."""
        if not place.rule.is_expert or self.layout.spec == "te":
            parameter = self.parameters[place.name]
            return parameter, 0, parameter.shape
        name, here = _without_expert(place.name)
        parameter = self.parameters[name]  # GroupedExperts: all of a rank in one
        return parameter, here * parameter[0].numel(), parameter.shape[1:]

    def _view(self, place: Place) -> Tensor:
        """Return a view of the model's own memory; Megatron moves that once, to its buffers."""
        parameter, first, shape = self._slot(place)
        return parameter.detach().view(-1)[first : first + shape.numel()].view(shape)

    def _part(self, place: Place, kind: str) -> Tensor:
        """Return this rank's part of a place; of another's experts, room for it."""
        if not kind:
            return self._view(place)
        parameter, first, shape = self._slot(place)
        if not self._has(place):
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        return self.shards.get(parameter, kind, first, shape.numel()).view(shape)

    def _all_experts(self, run: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
        """Yield one parameter of all of a layer's experts, views of one copy."""
        place, count = run[0], len(run)
        parts, owner = shapes_of(place, self.shape), place.stages[0]
        name, _ = _without_expert(place.name)
        found = self._of_all_ranks(name) if stage() in place.stages else None
        shape = (count, sum(rows for rows, _ in parts), parts[0][1])
        whole = told_by(owner, found, shape, dtype=self.dtype, device=self.device)
        tensors = whole.view(count * len(parts), *parts[0]).unbind()  # one call: it is 384 tensors
        names = (hf for one in run for hf in one.hf)
        yield from zip(names, tensors, strict=True)

    def _of_all_ranks(self, name: str) -> Tensor:
        group = parallel_state.get_expert_model_parallel_group()
        if self.layout.spec == "te":
            each = self.shape.experts // group.size()
            ours = (self.parameters[f"{name}{here}"].detach() for here in range(each))
            mine = torch.stack(list(ours))
        else:
            mine = self.parameters[name].detach()
        if group.size() == 1:
            return mine if self.layout.spec == "te" else mine.clone()
        found = mine.new_empty(self.shape.experts, *mine.shape[1:])
        dist.all_gather_into_tensor(found, mine.contiguous(), group=group)
        return found

    def _gathered(self, place: Place, part: Tensor) -> list[Tensor]:
        """Return copies of the parts of one place that `join` makes whole."""
        if place.rule.is_expert:
            group = parallel_state.get_expert_model_parallel_group()
            part = part.clone()
            if group.size() > 1:
                dist.broadcast(part, dist.get_global_rank(group, place.ep_rank), group=group)
            return [part]
        group = parallel_state.get_tensor_model_parallel_group()
        if place.rule.cut == "copy" or group.size() == 1:
            return [part.clone()]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return parts


def _run_of(place: Place) -> tuple[object, ...]:
    """Return what the places of one parameter of a layer's experts have in common."""
    return (place.stages, _without_expert(place.name)[0]) if place.rule.is_expert else (place.hf,)


def _without_expert(name: str) -> tuple[str, int]:
    """Return the parameter that an expert's name is of, and the expert's place on its rank.

    `local`: one parameter holds all of a rank's experts; `te`: each has its own, numbered.
    """
    stem, is_local, rest = name.partition(".local_experts.")
    if is_local:
        here, kind, _ = rest.split(".")
        return f"{stem}.{kind}", int(here)
    numbered, _, here = name.rpartition(".weight")
    return f"{numbered}.weight", int(here)
