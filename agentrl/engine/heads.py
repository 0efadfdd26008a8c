"""Which models SGLang would serve with a head that nobody trained."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import LaunchError

SEPARATE = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Afmoe", "Arcee", "Dbrx", "Deepseek", "Glm4Moe", "Glm4MoeLite", "GptOss", "KimiLinear"),
        *("LongcatFlash", "Mamba2", "Mellum", "MiniMaxM2", "Mixtral", "Olmoe", "Persimmon", "Phi"),
        *("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "StableLm", "Xverse", "XverseMoe", "HYV4"),
        *("GigaChat35", "KimiK3Linear", "MiniMaxM3Sparse", "MuseGlimmer"),
    )
)
"""Architectures whose class in SGLang has a head of its own whatever config.json says of ties; the
others (Llama, Qwen2, Qwen3, Gemma, Glm4, Granite, Olmo2, …) share or copy the embedding.
Source: srt/models of SGLang 0.5.23; Qwen3Moe's in 0.5.17 too."""


class LostHead(LaunchError):
    """No restart gives it one either."""


def refuse_lost_head(folder: Path) -> None:
    """Raise LostHead for a model whose head is its embedding, where SGLang reads no head from that.

    A tied head is neither in the files nor in a push, and SGLang checks nothing: its own stays what
    the memory held. Seen with Qwen3-MoE on 0.5.23: it starts, answers 200, and every
    log-probability is null.
    """
    path = folder / "config.json"
    if not path.is_file():
        return  # SGLang says so itself
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise LostHead(f"{path}: no JSON ({error}); copy the model's folder again") from error
    found = SEPARATE.intersection(config.get("architectures") or ())
    if found and config.get("tie_word_embeddings", False):  # untied by default, each of them
        raise LostHead(
            f"model {folder}: {min(found)} with tie_word_embeddings=true: SGLang reads no head for "
            "it and would answer noise. Give a checkpoint that holds lm_head.weight, be it a copy "
            "of the embedding, and says tie_word_embeddings=false; or set engine=embedded"
        )
