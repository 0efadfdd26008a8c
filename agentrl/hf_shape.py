"""What a Hugging Face config says of a model's tensors, of the families we know, and their cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe")
Spec = Literal["local", "te"]


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
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"num_experts_per_tok={self.experts_per_token}, num_experts={self.experts}: no "
                "more a token than there are"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a Megatron model is cut over ranks, and which names it has."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    spec: Spec = "local"

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError when `shape` cannot be cut so."""
        sizes = {"tp": self.tp, "ep": self.ep, "pp": self.pp}
        is_whole = all(type(size) is int and size >= 1 for size in sizes.values())
        if not is_whole or self.spec not in ("local", "te"):
            raise ConfigError(f"{self}: sizes must be 1 or more, spec local or te")
        if self.ep > 1 and not shape.experts:
            raise ConfigError(f"ep={self.ep}: {shape.family} has no experts; set ep=1")
        for size, name, number in (
            ("tp", "attention heads", shape.heads),
            ("tp", "key-value heads", shape.kv_heads),
            ("tp", "feed-forward width", 0 if shape.experts else shape.inner),
            ("ep", "experts", shape.experts),
            ("pp", "layers", shape.layers),
        ):
            if number % sizes[size]:
                raise ConfigError(
                    f"{size}={sizes[size]} does not divide the model's {number} {name}; "
                    f"take a {size} that does"
                )


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config.json of a model folder. Raises ConfigError."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not readable ({error}); give the folder of a Hugging Face model"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: holds a {type(found).__name__}, must be an object; give the folder of a "
            "Hugging Face model"
        )
    return found


def read_vocabulary(folder: Path) -> int:
    """Return how many words the model in `folder` has, of a family that is mapped or not."""
    return _size(read_config(folder), "vocab_size")


def why_unmapped(config: Mapping[str, Any]) -> str:
    """Return why the map of tensors does not hold a model; '' when it does."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return (
            f"model_type={family!r}: no map between Hugging Face and Megatron; "
            f"known are {', '.join(FAMILIES)}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            return f"{key}=true: the map has no biases; use a model without them"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return (
            f"mlp_only_layers={config.get('mlp_only_layers')}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step')}: every layer must have experts, or none"
        )
    return ""


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json tells. Raises ConfigError for what the map lacks."""
    if why := why_unmapped(config):
        raise ConfigError(why)
    is_moe = config["model_type"] == "qwen3_moe"
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    has_local = config.get("num_local_experts") is not None
    return ModelShape(
        family=config["model_type"],
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        inner=_size(config, "moe_intermediate_size" if is_moe else "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        experts=_size(config, "num_local_experts" if has_local else "num_experts") if is_moe else 0,
        experts_per_token=_size(config, "num_experts_per_tok") if is_moe else 0,
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


STEADY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary scaling whose angles do not depend on the length."""


def rope_of(config: Mapping[str, Any]) -> tuple[str, float]:
    """Return the kind of rotary scaling of a config.json, and its base."""
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = found.get("rope_theta", config.get("rope_theta", 10_000.0))
    return str(found.get("rope_type", found.get("type", "default"))), float(base)


def window_of(config: Mapping[str, Any]) -> int:
    """Return how far back a model's tokens attend in some of its layers; 0: all the way."""
    is_used = config.get("use_sliding_window", True) and config.get("sliding_window")
    is_named = "sliding_attention" in (config.get("layer_types") or ())
    return int(config.get("sliding_window") or 1) if is_used or is_named else 0


def check_computed(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model whose layers compute otherwise than those of Megatron here."""
    kind, act = rope_of(config)[0], config.get("hidden_act", "silu")
    why = ""
    if kind not in STEADY:
        why = f"rope_type={kind!r} in config.json: it knows {', '.join(STEADY)}"
    elif act not in ("silu", "swish"):
        why = f"hidden_act={act!r} in config.json: it knows silu"
    elif window := window_of(config):
        why = f"a sliding window of {window} in config.json: it attends to whole sequences only"
    if why:
        raise ConfigError(f"training.backend=megatron with {why}; set training.backend=torch")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        told = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{key} {told} in config.json: must be a whole number of 1 or more")
    return value
