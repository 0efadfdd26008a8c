"""A layer's experts as two products of torch's grouped matmul, instead of a loop over experts.

Megatron's own without Transformer Engine is that loop (SequentialMLP), which starts three small
kernels an expert and leaves a GPU idle most of the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (  # type: ignore[import-not-found, unused-ignore]
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import (  # type: ignore[import-not-found, unused-ignore]
    MegatronModule,
)
from torch import Tensor, nn

from agentrl.errors import ConfigError


class GroupedExperts(MegatronModule):  # type: ignore[misc, unused-ignore]
    """The experts of one rank, in the order in which Megatron's dispatcher sorts tokens."""

    def __init__(self, experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        if pg_collection is not None and pg_collection.expt_tp.size() > 1:
            raise ConfigError("expert tensor parallelism: experts are never cut; set it to 1")
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        place = {"dtype": config.params_dtype, "device": device}
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **place))
        self.linear_fc2 = nn.Parameter(torch.empty(experts, hidden, inner, **place))
        for weight in (self.linear_fc1, self.linear_fc2):
            # Megatron sums its gradient over the ranks that have the same experts only
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            # no other tensor-parallel rank counts it in the gradient's norm
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, None]:
        """Return [tokens, hidden], each row by its own expert, times its probability."""
        if not len(hidden):  # the products refuse no rows; the weights still get a gradient
            return hidden @ self.linear_fc1[0].T @ self.linear_fc2[0].repeat(1, 2).T, None
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        both = torch._grouped_mm(hidden, self.linear_fc1.mT, offs=ends)
        gate, up = both.chunk(2, -1)
        inner = (F.silu(gate) * up * probabilities.unsqueeze(-1)).to(hidden.dtype)
        out = torch._grouped_mm(inner, self.linear_fc2.mT, offs=ends)
        if out.requires_grad:
            # its backward refuses other strides
            out.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call, unused-ignore]
        return out, None


def check_experts(body: nn.Module, layers: int) -> None:
    """Refuse a mixture that was not built of these: another's loop would be silent, and slow."""
    found = sum(isinstance(module, GroupedExperts) for module in body.modules())
    if found != layers:
        raise ConfigError(
            f"megatron-core built {layers - found} of {layers} layers without GroupedExperts, so "
            "with a loop over experts; this version of it takes the layer's parts from elsewhere: "
            "pip install 'megatron-core>=0.16.1,<0.20'"
        )
