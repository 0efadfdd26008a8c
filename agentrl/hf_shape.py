"""What a Hugging Face config says of a model's tensors: the families the trainer knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder; experts 0 means a dense one."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Of a dense layer's feed-forward, or of one expert's."""
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    is_tied: bool = False
    """The head is the embedding; no file has it twice."""

    @property
    def has_qk_norm(self) -> bool:
        return self.family != "llama"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.heads}, num_key_value_heads={self.kv_heads}: the first "
                "must be a multiple of the second"
            )


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json tells. Raises ConfigError for what the map lacks."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type={family!r}: no map between Hugging Face and Megatron; "
            f"known are {', '.join(FAMILIES)}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ConfigError(f"{key}=true: the map has no biases; use a model without them")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"mlp_only_layers={config.get('mlp_only_layers')}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step')}: every layer must have experts, or none"
        )
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    is_moe = family == "qwen3_moe"
    heads = config["num_attention_heads"]
    return ModelShape(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        inner=config["moe_intermediate_size" if is_moe else "intermediate_size"],
        vocabulary=config["vocab_size"],
        experts=experts if is_moe else 0,
        experts_per_token=config.get("num_experts_per_tok", 0) if is_moe else 0,
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )
