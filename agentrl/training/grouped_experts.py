"""A layer's experts as two products of torch's grouped matmul, and the way of tokens to them.

Megatron's own without Transformer Engine is a loop over experts (SequentialMLP), which starts three
small kernels an expert and leaves a GPU idle most of the time; its dispatcher adds up what comes
back with atomics, and waits for the GPU in each layer. Of Megatron's mixture this keeps the router.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from megatron.core.tensor_parallel import (  # type: ignore[import-not-found, unused-ignore]
    all_to_all,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import (  # type: ignore[import-not-found, unused-ignore]
    MegatronModule,
)
from megatron.core.transformer.moe.moe_utils import (  # type: ignore[import-not-found, unused-ignore]
    get_default_pg_collection,
)
from megatron.core.transformer.moe.router import (  # type: ignore[import-not-found, unused-ignore]
    TopKRouter,
)
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.training.balance import Balance
from agentrl.training.gate import gated
from agentrl.training.replay import chances_of, count_changes, picked
from agentrl.training.rows import collect, spread, way_of


class GroupedExperts(MegatronModule):  # type: ignore[misc, unused-ignore]
    """The experts of one rank."""

    def __init__(self, experts: int, config: Any) -> None:
        super().__init__(config=config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        place = {"dtype": config.params_dtype, "device": device}
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **place))
        self.linear_fc2 = nn.Parameter(torch.empty(experts, hidden, inner, **place))
        for weight in (self.linear_fc1, self.linear_fc2):
            # Megatron sums its gradient over all ranks that have these experts, and no others;
            # with sequence parallelism the tensor-parallel ranks are among them
            weight.allreduce = False  # type: ignore[attr-defined]
            # no other tensor-parallel rank counts it in the gradient's norm
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)

    def forward(self, rows: Tensor, counts: Tensor, chances: Tensor) -> Tensor:
        """Return [n, hidden] of rows [n, hidden], which lie by expert, times their chances.

        counts: [experts], rows of each.
        """
        if not len(rows):  # the products refuse no rows; weights and chances still get a gradient,
            # for whose way back to the tokens' ranks the other ranks wait
            none = rows @ self.linear_fc1[0].T @ self.linear_fc2[0].repeat(1, 2).T
            return none * chances[:, None].to(none.dtype)
        ends = counts.cumsum(0).to(rows.device, torch.int32)
        both = torch._grouped_mm(rows, self.linear_fc1.mT, offs=ends)
        return torch._grouped_mm(gated(both, chances), self.linear_fc2.mT, offs=ends)


class Mixture(MegatronModule):  # type: ignore[misc, unused-ignore]
    """A layer of experts: Megatron's router, each token to its experts' ranks, and back."""

    def __init__(self, config: Any, **ignored: Any) -> None:
        super().__init__(config=config)
        self.router = TopKRouter(config=config, pg_collection=get_default_pg_collection())
        self.group = parallel_state.get_expert_model_parallel_group()
        self.each = config.num_moe_experts // self.group.size()
        self.experts = GroupedExperts(self.each, config)
        self.told: Tensor | None = None
        """[tokens here, k] experts to take; None: as the router chooses."""
        self.changes: Tensor | None = None
        """`count_changes` of all that was told."""
        self.balance: Balance | None = None
        """Of the tokens here; None: the router is not balanced."""

    def set_layer_number(self, number: int) -> None:
        self.router.set_layer_number(number)

    def forward(self, hidden: Tensor, **ignored: Any) -> tuple[Tensor, None]:
        """Return (the experts' sum for each token, no bias), hidden's shape."""
        owners, chances, counts = self._routed(hidden)
        way = way_of(owners, self.config.num_moe_experts)
        mine = chances.flatten().index_select(0, way.order)
        rows = spread(hidden.view(-1, hidden.shape[-1]), way)
        answer = self._exchanged(rows, mine, counts)
        return collect(answer, way).view(hidden.shape), None

    def _routed(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's experts and their chances, both [tokens, k], and [experts] counts."""
        per_token = self.config.moe_router_topk
        if self.told is None and self.balance is None:
            chances, is_chosen = self.router(hidden)
            owners = is_chosen.to(torch.uint8).topk(per_token, 1).indices
            return owners, chances.gather(1, owners), is_chosen.sum(0)
        logits = self.router.gating(hidden).view(-1, self.config.num_moe_experts)
        owners = self._replayed(logits.topk(per_token, 1).indices)
        chances = chances_of(logits, owners, is_normalized=not self.config.moe_router_pre_softmax)
        if self.balance is not None:
            layer = self.router.layer_number - 1
            chances = self.balance.joined(chances, logits, owners, layer=layer)
        times = torch.zeros_like(logits, dtype=torch.uint8)
        times.scatter_add_(1, owners, torch.ones_like(owners, dtype=torch.uint8))
        return owners, chances, times.sum(0)

    def _replayed(self, own: Tensor) -> Tensor:
        """Return the experts to take for those that the router chooses, both [tokens, k]."""
        if self.told is None:
            return own
        if torch.is_grad_enabled():  # once, where layers are computed again
            found = count_changes(self.told, own)
            self.changes = found if self.changes is None else self.changes + found
        return picked(self.told, own)

    def _exchanged(self, rows: Tensor, chances: Tensor, counts: Tensor) -> Tensor:
        """Let each row's expert have it, wherever that is; rows lie by expert here and there."""
        if self.group.size() == 1:
            return cast(Tensor, self.experts(rows, counts, chances))
        sent, found = self._counts(counts)
        here = found.sum(0)
        sizes = torch.stack([sent, found.sum(1)]).tolist()  # the one wait for the GPU in a layer
        given, taken = sizes
        rows = all_to_all(self.group, rows, taken, given)
        chances = all_to_all(self.group, chances, taken, given)
        experts = torch.arange(self.each, device=rows.device).repeat(self.group.size())
        owners = experts.repeat_interleave(found.flatten(), output_size=sum(taken))
        way = way_of(owners[:, None], self.each)
        answer = self.experts(spread(rows, way), here, spread(chances[:, None], way)[:, 0])
        return cast(Tensor, all_to_all(self.group, collect(answer, way), given, taken))

    def _counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows for each rank, [ranks, experts here] rows from each rank)."""
        size, rank = self.group.size(), self.group.rank()
        every = counts.new_empty(size * len(counts))
        dist.all_gather_into_tensor(every, counts.contiguous(), group=self.group)
        by_rank = every.view(size, size, self.each)
        return by_rank[rank].sum(1), by_rank[:, rank]


def tell_mixture(layer: Any, _: Any, given: dict[str, Any]) -> None:
    """Hook before a layer of Megatron's: its mixture takes what the row's packing says.

    A micro-batch's own, whichever are under way between stages, and again where it is recomputed.
    """
    packing = given["packed_seq_params"]
    told = packing.experts
    layer.mlp.told = None if told is None else told[layer.layer_number - 1]
    layer.mlp.balance = packing.balance


def check_experts(body: nn.Module, layers: int) -> None:
    """Refuse a mixture built of another's experts: a loop over them would be silent, and slow."""
    found = sum(_is_grouped(module) for module in body.modules())
    if found != layers:
        raise ConfigError(
            f"megatron-core built {layers - found} of {layers} layers without grouped experts, so "
            "with a loop over them; this version of it takes the layer's parts from elsewhere: "
            "pip install 'megatron-core>=0.16.1,<0.20'"
        )


def _is_grouped(module: nn.Module) -> bool:
    return isinstance(module, GroupedExperts) or type(module).__name__ == "TEGroupedMLP"
