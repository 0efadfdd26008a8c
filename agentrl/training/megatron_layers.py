"""A GPT in megatron-core, up to its last hidden states: the head is `head`'s.

`local` layers need no Transformer Engine: Megatron's projections, router and embedding; our norm,
attention and experts, for Megatron's own refuse packed rows, sequence parallelism and a grouped
product there. `te` layers are Megatron's own on Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-not-found, unused-ignore]
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import (  # type: ignore[import-not-found, unused-ignore]
    GPTModel,
)
from megatron.core.transformer import (  # type: ignore[import-not-found, unused-ignore]
    transformer_block,
)
from megatron.core.transformer.identity_op import (  # type: ignore[import-not-found, unused-ignore]
    IdentityOp,
)
from megatron.core.transformer.moe import (  # type: ignore[import-not-found, unused-ignore]
    moe_utils,
)
from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found, unused-ignore]
    TransformerConfig,
)
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.hf_shape import Layout, ModelShape, rope_of
from agentrl.training.grouped_experts import Mixture, tell_mixture
from agentrl.training.megatron_attention import PackedSelfAttention

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16.1 binds the name with Transformer Engine only, and reads it without
    moe_utils.te_general_gemm = None


class RMSNorm(torch.nn.Module):
    """RMSNorm whose weight's gradient Megatron sums over the sequence-parallel ranks."""

    eps: Tensor

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.epsilon = eps
        self.register_buffer("eps", torch.tensor(eps), persistent=False)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


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
    is_te = layout.spec == "te"
    spec = te_layer_spec(shape) if is_te else layer_spec(shape)
    config = make_config(shape, hf, layout, dtype)
    if recomputes:  # of each layer only its input is kept
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 1
    body = Body(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocabulary + -shape.vocabulary % (128 * layout.tp),
        max_sequence_length=hf.get("max_position_embeddings", 32_768),
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.is_tied,
        # our attention turns queries and keys itself
        position_embedding_type="rope" if is_te else "none",
        rotary_base=te_rotary_base(hf) if is_te else 10_000,
    )
    for layer in body.decoder.layers:
        if isinstance(layer.mlp, Mixture):
            layer.register_forward_pre_hook(tell_mixture, with_kwargs=True)
    return config, body.cuda() if torch.cuda.is_available() else body


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
        "moe_grouped_gemm": layout.spec == "te",
        "moe_permute_fusion": layout.spec == "te",
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
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=dtype,
        variable_seq_lengths=layout.pp > 1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.tp > 1,
        moe_token_dispatcher_type="alltoall",  # of dense models, too: others refuse variable rows
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, never averaged
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=layout.spec == "te",
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
    layer, attention = spec.submodules, spec.submodules.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.module = PackedSelfAttention
    if shape.has_qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    else:  # Megatron's local layers put an IdentityOp there
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = None
    attention.submodules.core_attention = IdentityOp
    if shape.experts:
        layer.mlp = Mixture
    transformer_block.LayerNormImpl = RMSNorm  # the final norm, which no spec names
    return spec


def te_layer_spec(shape: ModelShape) -> Any:
    """Return Megatron's own layers on Transformer Engine. Raises ConfigError without it."""
    try:
        import transformer_engine  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"training.megatron_layers=te: Transformer Engine does not import here ({error}); "
            "install it in the trainer's image, or set training.megatron_layers=local"
        ) from error
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=bool(shape.experts),
        qk_layernorm=shape.has_qk_norm,
    )


def te_rotary_base(hf: Mapping[str, Any]) -> int:
    """Return the base of a plain rotary embedding, the one that `te` layers are given."""
    kind, base = rope_of(hf)
    if kind != "default":
        raise ConfigError(
            f"rope_type={kind!r} in config.json: training.megatron_layers=te knows default only; "
            "set training.megatron_layers=local"
        )
    return int(base)
