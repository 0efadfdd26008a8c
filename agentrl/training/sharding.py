"""FSDP2 over a policy: each decoder layer a unit, all else one more; and whole tensors again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from agentrl.training.policy import Policy


def layers_of(policy: Policy) -> Iterator[nn.Module]:
    layers = policy.model.get_submodule("model.layers")
    return iter(cast(nn.ModuleList, layers))


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Cut the parameters over the mesh; compute in `dtype`, sum gradients in float32.

    Each unit is moved to the mesh's device as it is cut, so that no GPU ever holds all of a model
    that was on the CPU.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in layers_of(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return all of a sharded tensor on each rank, in `dtype`; every rank must ask.

    Parts are cast before they are gathered, and equal ones gathered without DTensor's way, which
    costs the host a third of a millisecond each.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype or tensor.dtype)
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    if placement != Shard(0) or len(tensor) % mesh.size():
        return cast(DTensor, tensor.to(dtype or tensor.dtype)).full_tensor()
    part = tensor.to_local().to(dtype or tensor.dtype)
    if mesh.size() == 1:
        return part
    found = part.new_empty(tensor.shape)
    dist.all_gather_into_tensor(found, part.contiguous(), group=mesh.get_group())
    return found


def like(full: Tensor | None, model: Tensor) -> Tensor:
    """Cut rank 0's `full` as `model` is cut; other ranks give None. float32, on model's device."""
    if not isinstance(model, DTensor):
        assert full is not None
        return full.to(model.device, torch.float32, copy=True)
    if full is None:
        full = torch.empty(model.shape, dtype=torch.float32)
    full = full.to(model.device, torch.float32)
    return cast(Tensor, distribute_tensor(full, model.device_mesh, model.placements))
