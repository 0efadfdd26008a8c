"""A GPT in megatron-core without Transformer Engine: `local` layers with our norm and attention.

Megatron's own local attention refuses packed rows, and its local norm sequence parallelism; these
two stand in for them. It gives hidden states: the head is `head`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-not-found, unused-ignore]
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import (  # type: ignore[import-not-found, unused-ignore]
    GPTModel,
)
from megatron.core.transformer import (  # type: ignore[import-not-found, unused-ignore]
    transformer_block,
)
from megatron.core.transformer.module import (  # type: ignore[import-not-found, unused-ignore]
    MegatronModule,
)
from megatron.core.transformer.moe import (  # type: ignore[import-not-found, unused-ignore]
    moe_utils,
)
from megatron.core.transformer.spec_utils import (  # type: ignore[import-not-found, unused-ignore]
    ModuleSpec,
)
from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found, unused-ignore]
    TransformerConfig,
)
from torch import Tensor

from agentrl.training.grouped_experts import GroupedExperts
from agentrl.training.hf_map import Layout
from agentrl.training.hf_shape import ModelShape


class PackedAttention(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Causal attention by scaled_dot_product_attention, each sequence of a packed row apart."""

    def __init__(
        self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[tokens, heads, dim] with packed_seq_params, else [T, rows, heads, dim]."""
        if packed_seq_params is None:
            return self._attend(query, key, value)
        parts = [
            self._attend(*(part[first:last, None] for part in (query, key, value)))
            for first, last in pairwise(packed_seq_params.cu_seqlens_q.tolist())
        ]
        return torch.cat(parts).squeeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(torch.nn.Module):
    """RMSNorm whose weight's gradient Megatron sums over the sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(hidden.dtype) * self.weight


class Body(GPTModel):  # type: ignore[misc, unused-ignore]
    """Megatron's GPT up to the final norm; the output layer holds the head's weight, unused."""

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


def make_body(
    shape: ModelShape,
    hf: Mapping[str, Any],
    layout: Layout,
    *,
    dtype: torch.dtype,
    recomputes: bool = False,
) -> tuple[Any, Body]:
    """Return Megatron's config and this rank's part of the model, its weights not yet loaded."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 binds the name with Transformer Engine only, and reads it without
        moe_utils.te_general_gemm = None
    config = make_config(shape, hf, layout, dtype)
    if recomputes:  # of each layer only its input is kept
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 1
    body = Body(
        config=config,
        transformer_layer_spec=layer_spec(shape),
        vocab_size=shape.vocabulary + -shape.vocabulary % (128 * layout.tp),
        max_sequence_length=hf.get("max_position_embeddings", 32_768),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_base=rope_theta(hf),
    )
    return config, body


def make_config(
    shape: ModelShape, hf: Mapping[str, Any], layout: Layout, dtype: torch.dtype
) -> Any:
    experts = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": hf.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": shape.inner,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
    }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.inner,
        normalization="RMSNorm",
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-6),
        qk_layernorm=shape.has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.tp > 1,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, never averaged
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(experts if shape.experts else {}),
    )


def layer_spec(shape: ModelShape) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.has_qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if shape.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if shape.experts:
        layer.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    transformer_block.LayerNormImpl = RMSNorm  # the final norm, which no spec names
    return spec


def rope_theta(hf: Mapping[str, Any]) -> float:
    found = hf.get("rope_parameters") or hf
    return float(found.get("rope_theta", 10_000.0))
