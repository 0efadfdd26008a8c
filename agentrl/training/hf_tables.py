"""Hugging Face's tensors and Megatron's: a table a family, and who holds what. No torch.

Megatron's names are given twice: `local` layers, and those of Transformer Engine, which fuse the
norms into the next product and number grouped experts. Attention's rows lie by key-value group, its
queries, key and value together; gate and up are one tensor, each cut apart; the vocabulary is
padded. Source: megatron-core 0.16 and 0.19 (gpt_layer_specs, attention, mlp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from agentrl.hf_shape import Layout, ModelShape, Spec

Cut = Literal["copy", "rows", "columns", "qkv", "gated", "vocabulary"]
"""How tensor parallelism cuts a tensor; `copy` is not cut."""
HEAD = "output_layer.weight"
VOCABULARY_MULTIPLE = 128
"""Of words on each rank: Megatron's make_vocab_size_divisible_by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of Megatron's parameters and the Hugging Face tensors it is made of."""

    local: str
    te: str
    hf: tuple[str, ...]
    cut: Cut
    is_expert: bool = False

    def megatron(self, spec: Spec) -> str:
        return self.te if spec == "te" else self.local


LAYER = "model.layers.{layer}."
ATTENTION = (
    Rule(
        local="input_layernorm.weight",
        te="self_attention.linear_qkv.layer_norm_weight",
        hf=("input_layernorm.weight",),
        cut="copy",
    ),
    Rule(
        local="self_attention.linear_qkv.weight",
        te="self_attention.linear_qkv.weight",
        hf=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        cut="qkv",
    ),
    Rule(
        local="self_attention.linear_proj.weight",
        te="self_attention.linear_proj.weight",
        hf=("self_attn.o_proj.weight",),
        cut="columns",
    ),
)
QK_NORM = tuple(
    Rule(
        local=f"self_attention.{part}_layernorm.weight",
        te=f"self_attention.{part}_layernorm.weight",
        hf=(f"self_attn.{part}_norm.weight",),
        cut="copy",
    )
    for part in "qk"
)
DENSE = (
    Rule(
        local="pre_mlp_layernorm.weight",
        te="mlp.linear_fc1.layer_norm_weight",
        hf=("post_attention_layernorm.weight",),
        cut="copy",
    ),
    Rule(
        local="mlp.linear_fc1.weight",
        te="mlp.linear_fc1.weight",
        hf=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        cut="gated",
    ),
    Rule(
        local="mlp.linear_fc2.weight",
        te="mlp.linear_fc2.weight",
        hf=("mlp.down_proj.weight",),
        cut="columns",
    ),
)
ROUTED = (
    Rule(
        local="pre_mlp_layernorm.weight",
        te="pre_mlp_layernorm.weight",
        hf=("post_attention_layernorm.weight",),
        cut="copy",
    ),
    Rule(local="mlp.router.weight", te="mlp.router.weight", hf=("mlp.gate.weight",), cut="copy"),
)
EXPERT = (
    Rule(
        local="mlp.experts.local_experts.{here}.linear_fc1.weight",
        te="mlp.experts.linear_fc1.weight{here}",
        hf=("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        cut="gated",
        is_expert=True,
    ),
    Rule(
        local="mlp.experts.local_experts.{here}.linear_fc2.weight",
        te="mlp.experts.linear_fc2.weight{here}",
        hf=("mlp.experts.{expert}.down_proj.weight",),
        cut="columns",
        is_expert=True,
    ),
)
TABLES: Mapping[str, tuple[Rule, ...]] = {
    "llama": (*ATTENTION, *DENSE),
    "qwen3": (*ATTENTION, *QK_NORM, *DENSE),
    "qwen3_moe": (*ATTENTION, *QK_NORM, *ROUTED, *EXPERT),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One parameter of one model: its rule with all numbers filled in, and who holds it."""

    rule: Rule
    name: str
    """Megatron's, as the rank that holds it numbers layers and experts."""
    hf: tuple[str, ...]
    stages: tuple[int, ...]
    """Pipeline stages that hold it; a tied embedding has two places, on the first and the last."""
    ep_rank: int = 0


def places(shape: ModelShape, layout: Layout) -> Iterator[Place]:
    """Yield every parameter of the model, in Hugging Face's order of layers."""
    layout.check(shape)
    last = layout.pp - 1
    yield from _outer("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0)
    each = shape.layers // layout.pp
    for layer in range(shape.layers):
        for rule in TABLES[shape.family]:
            if not rule.is_expert:
                yield _place(rule, layout, layer, each)
                continue
            for expert in range(shape.experts):
                yield _place(rule, layout, layer, each, expert, shape.experts // layout.ep)
    yield Place(
        rule=Rule(local="", te="", hf=(), cut="copy"),
        name="decoder.final_layernorm.weight",
        hf=("model.norm.weight",),
        stages=(last,),
    )
    if not shape.is_tied:
        yield from _outer(HEAD, "lm_head.weight", last)
    elif last:
        yield from _outer(HEAD, "model.embed_tokens.weight", last)


def _outer(name: str, hf: str, stage: int) -> Iterator[Place]:
    rule = Rule(local=name, te=name, hf=(hf,), cut="vocabulary")
    yield Place(rule=rule, name=name, hf=(hf,), stages=(stage,))


def _place(
    rule: Rule, layout: Layout, layer: int, each: int, expert: int = 0, experts_each: int = 1
) -> Place:
    rest = rule.megatron(layout.spec).format(here=expert % experts_each)
    return Place(
        rule=rule,
        name=f"decoder.layers.{layer % each}.{rest}",
        hf=tuple((LAYER + name).format(layer=layer, expert=expert) for name in rule.hf),
        stages=(layer // each,),
        ep_rank=expert // experts_each,
    )


def shapes_of(place: Place, shape: ModelShape) -> list[tuple[int, ...]]:
    """Return the shapes that the place's Hugging Face tensors must have, in order."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if place.rule.cut == "qkv":
        return [(rows, shape.hidden) for rows in (queries, keys, keys)]
    if place.rule.cut == "gated":
        return [(shape.inner, shape.hidden)] * 2
    if place.rule.cut == "vocabulary":
        return [(shape.vocabulary, shape.hidden)]
    if place.rule.cut == "columns":
        wide = queries if "o_proj" in place.hf[0] else shape.inner
        return [(shape.hidden, wide)]
    if place.hf[0].endswith("mlp.gate.weight"):
        return [(shape.experts, shape.hidden)]
    is_head_norm = place.hf[0].endswith(("q_norm.weight", "k_norm.weight"))
    return [(shape.head_dim if is_head_norm else shape.hidden,)]
