"""Megatron's distributed optimizer, read and written by parameter: its shards are of flat buffers.

Each data-parallel rank holds the float32 weights and moments of a range of each parameter, or of
none of it. What is asked for is put together over the ranks, a slice at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn

WEIGHT = "param"
"""What Megatron calls the float32 weights among the kinds `exp_avg` and `exp_avg_sq`."""


class OptimizerShards:
    """Every rank must make each call, for the same parameter and slice."""

    def __init__(self, optimizer: Any) -> None:
        self.parts = getattr(optimizer, "chained_optimizers", [optimizer])
        for part in self.parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["foreach"], group["fused"] = False, True  # no copies of all parameters

    def get(self, parameter: nn.Parameter, kind: str, first: int, count: int) -> Tensor:
        """Return elements [first, first + count) of the flat parameter's `kind`, float32."""
        whole = torch.zeros(count, dtype=torch.float32, device=parameter.device)
        if (mine := self._mine(parameter, kind)) is not None:
            shard, start = mine
            low, high = max(start, first), min(start + len(shard), first + count)
            if low < high:
                whole[low - first : high - first] = shard[low - start : high - start]
        group = _ranks_with(parameter)
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole

    def put(self, parameter: nn.Parameter, kind: str, first: int, values: Tensor) -> None:
        """Write `values`, flat and of all ranks, from element `first` on."""
        if (mine := self._mine(parameter, kind, makes=True)) is None:
            return
        shard, start = mine
        low, high = max(start, first), min(start + len(shard), first + len(values))
        if low < high:
            shard[low - start : high - start] = values[low - first : high - first]

    def clear(self) -> None:
        for part in self.parts:
            part.optimizer.state.clear()

    def set_step(self, updates: int) -> None:
        """Tell how many updates were taken: torch's Adam counts by parameter, Apex's by group."""
        for part in self.parts:
            inner = part.optimizer
            for group in inner.param_groups:
                if not isinstance(inner, torch.optim.AdamW):
                    group["step"] = updates
                    continue
                for parameter in group["params"]:
                    step = torch.tensor(float(updates), device=parameter.device)
                    inner.state[parameter]["step"] = step

    def _mine(
        self, parameter: nn.Parameter, kind: str, *, makes: bool = False
    ) -> tuple[Tensor, int] | None:
        """Return this rank's flat shard and where it starts in the parameter."""
        for part in self.parts:
            if parameter not in part.model_param_group_index_map:
                continue
            group, place = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][place]
            start = part._get_model_param_range_map(parameter)["param"].start
            if kind == WEIGHT:
                return main.detach().view(-1), start
            state = part.optimizer.state[main]
            if makes and kind not in state:
                state[kind] = torch.zeros_like(main.detach())
            return state[kind].view(-1), start
        return None


def _ranks_with(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Return the group over which this parameter's shards are spread."""
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group
