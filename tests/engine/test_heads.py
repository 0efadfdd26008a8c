"""Models whose head SGLang would not read are refused before it is started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.config import EngineConfig
from agentrl.engine.heads import LostHead, refuse_lost_head
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.errors import LaunchError
from agentrl.events import NoEvents


def model_of(folder: Path, architecture: str, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps({"architectures": [architecture], **config})
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe", "Mixtral", "GptOss", "Glm4Moe"])
def test_a_tied_head_that_sglang_does_not_read_is_refused(odd_path: Path, name: str) -> None:
    tied = model_of(odd_path, f"{name}ForCausalLM", tie_word_embeddings=True)
    with pytest.raises(LostHead, match=rf"{name}ForCausalLM with tie_word_embeddings=true"):
        refuse_lost_head(tied)
    refuse_lost_head(model_of(odd_path, f"{name}ForCausalLM", tie_word_embeddings=False))
    refuse_lost_head(model_of(odd_path, f"{name}ForCausalLM"))


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama", "Gemma3", "Glm4", "Unheard"])
def test_a_tied_head_that_sglang_shares_is_taken(odd_path: Path, name: str) -> None:
    refuse_lost_head(model_of(odd_path, f"{name}ForCausalLM", tie_word_embeddings=True))


def test_a_torn_config_is_named(odd_path: Path) -> None:
    model_of(odd_path, "Qwen3ForCausalLM")
    (odd_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(LostHead, match=r"config\.json: no JSON"):
        refuse_lost_head(odd_path)


def test_a_node_whose_model_would_lose_its_head_starts_nothing(tmp_path: Path) -> None:
    tied = model_of(tmp_path / "moe", "Qwen3MoeForCausalLM", tie_word_embeddings=True)
    supervisor = EngineSupervisor(
        EngineConfig(kind="sglang"), model=tied, logs=tmp_path / "logs", events=NoEvents()
    )
    with pytest.raises(
        LaunchError, match=r"would meet the same.*by model: .*holds lm_head\.weight"
    ):
        asyncio.run(supervisor.start(None))
    assert not (tmp_path / "logs").exists()
