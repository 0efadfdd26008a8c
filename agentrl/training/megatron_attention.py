"""Self-attention of Megatron's `local` layers over packed rows.

Megatron's own refuses packed rows without Transformer Engine, and turns queries and keys in a dozen
small kernels; this keeps its two projections and its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import (  # type: ignore[import-not-found, unused-ignore]
    PackedSeqParams,
)
from megatron.core.transformer.attention import (  # type: ignore[import-not-found, unused-ignore]
    SelfAttention,
)
from torch import Tensor

from agentrl.hf_shape import rope_of
from agentrl.training.attention import attend_packed
from agentrl.training.balance import Balance
from agentrl.training.fused import turned, turned_norm

"""Kinds of rotary scaling, beside none, whose angles do not depend on a row's length."""


@dataclass(kw_only=True)
class Packing(PackedSeqParams):  # type: ignore[misc, unused-ignore]
    """Where a packed row's sequences end, and the angles of its positions."""

    cosines: Tensor
    """[tokens, dim / 2] float32, as `sines`."""
    sines: Tensor
    lengths: tuple[int, ...]
    """Of the sequences."""
    experts: Tensor | None = None
    """[layers, tokens here, k] that tokens go to; None: as the routers choose."""
    balance: Balance | None = None
    """The tokens' part in balancing routers; None: they are not balanced."""


class Rotary:
    """The angles by which a model turns queries and keys. Source: arXiv:2104.09864."""

    def __init__(self, hf: Mapping[str, Any], head_dim: int, device: torch.device) -> None:
        self.device = device
        self.frequencies, self.scale = _frequencies(hf, head_dim)

    def packing(self, ends: Tensor) -> Packing:
        """Return what a row's layers need. ends: [sequences + 1] int32 on the CPU, 0 first."""
        lengths = ends.diff()
        positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(lengths)
        angles = positions.to(self.device).float()[:, None] * self.frequencies.to(self.device)
        there, longest = ends.to(self.device), int(lengths.max())
        return Packing(
            qkv_format="thd",
            cu_seqlens_q=there,
            cu_seqlens_kv=there,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cosines=angles.cos() * self.scale,
            sines=angles.sin() * self.scale,
            lengths=tuple(lengths.tolist()),
        )


def _frequencies(hf: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return [head_dim / 2] radians a position, and what sines and cosines are multiplied by."""
    kind, base = rope_of(hf)
    if kind == "default":
        return 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**hf)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)


class PackedSelfAttention(SelfAttention):  # type: ignore[misc, unused-ignore]
    """Megatron's projections, `attend_packed` between them."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [tokens, 1, hidden], or this rank's part of the tokens; returns that."""
        both, _ = self.linear_qkv(hidden_states)
        dim = self.hidden_size_per_attention_head
        groups = both.view(len(both), self.num_query_groups_per_partition, -1, dim)
        queries, keys, values = groups.split([groups.shape[2] - 2, 1, 1], 2)
        packing = packed_seq_params
        out = attend_packed(
            self._turned(queries, self.q_layernorm, packing),
            self._turned(keys, self.k_layernorm, packing),
            values.flatten(1, 2),
            packing.cu_seqlens_q,
            packing.max_seqlen_q,
            scale=self.config.softmax_scale,
            lengths=packing.lengths,
        )
        answer: tuple[Tensor, Tensor | None] = self.linear_proj(out.flatten(1)[:, None])
        return answer

    def _turned(self, states: Tensor, norm: Any, packing: Packing) -> Tensor:
        """Return [tokens, heads, dim] of [tokens, groups, heads of one, dim]."""
        angles = (packing.cosines, packing.sines)
        if norm is None:
            return turned(states, *angles).flatten(1, 2)
        return turned_norm(states, norm.weight, norm.eps, *angles).flatten(1, 2)
