"""Experts that an engine tells, joined over the parts and turns of a trajectory."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from served import served

from agentrl.agent.tokens import TokenBuffer
from agentrl.config import EngineConfig, RunConfig
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.experts import ModelExperts, read_experts
from agentrl.errors import ConfigError, EngineLost
from agentrl.handoff.replayed import replayed_experts

MODEL = ModelExperts(layers=3, count=300, per_token=2)
CONFIG = EngineConfig(retries=3, start_timeout_s=0.2, context_length=1000)


def taken(tokens: Sequence[int]) -> np.ndarray:
    """Return made-up experts, of each position others. [tokens, layers, experts a token] int32"""
    base = np.asarray(tokens)[:, None, None] * 7 + np.arange(len(tokens))[:, None, None] * 31
    return ((base + np.arange(6).reshape(3, 2) * 50) % MODEL.count).astype(np.int32)


class Mixture:
    """Samples as many tokens as `parts` says, then aborts (True) or stops; it tells experts as
    SGLang does: none of a request that is aborted while it waits (tells=False)."""

    def __init__(self, parts: Sequence[tuple[int, bool, bool]], spoils: Any = None) -> None:
        self.parts, self.spoils = list(parts), spoils
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        count, aborts, tells = self.parts.pop(0) if self.parts else (1, False, True)
        sampled = [len(body["input_ids"]) + place for place in range(count)]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort" if aborts else "stop"},
            "output_token_logprobs": [[-0.5, one, None] for one in sampled],
        }
        if body.get("return_routed_experts") and (tells or not aborts):
            whole = taken([*body["input_ids"], *sampled])
            rows = whole[body.get("routed_experts_start_len", 0) : -1]
            told = rows.tobytes() if self.spoils is None else self.spoils(rows)
            meta["routed_experts"] = base64.b64encode(told).decode()
        return web.json_response({"text": "", "output_ids": sampled, "meta_info": meta})


def play(
    server: Mixture, turns: Sequence[int], experts: ModelExperts | None = MODEL
) -> TokenBuffer:
    """Take turns, each of that many tokens of context and a reply, as the agent's loop does."""

    async def go() -> TokenBuffer:
        buffer = TokenBuffer([5, 6, 7])
        async with (
            served(server.handle) as url,
            EngineClient(lambda: [url], CONFIG, experts=experts) as client,
        ):
            for context in turns:
                buffer.append_context(range(context))
                sampling = Sampling(
                    max_new_tokens=500, temperature=1.0, experts_from=buffer.known_experts
                )
                reply = await client.generate(buffer.tokens, sampling, trajectory="1/0/0")
                buffer.append_sampled(reply)
        return buffer

    return asyncio.run(go())


def whole(buffer: TokenBuffer) -> np.ndarray:
    """Return what a trajectory must hold: its last token was never computed."""
    known = taken(buffer.tokens)
    known[-1] = known[-2]
    return known


parts = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=8)


@settings(max_examples=40, deadline=None)
@given(parts=parts, turns=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_any_split_into_parts_and_turns_gives_the_same_experts(parts, turns) -> None:
    server = Mixture(parts)
    buffer = play(server, turns)
    assert buffer.experts.dtype == np.uint16
    assert np.array_equal(buffer.experts, whole(buffer))


def test_each_position_is_sent_once() -> None:
    server = Mixture([(4, True, True), (3, False, True), (2, False, True)])
    buffer = play(server, [0, 5])
    assert [one.get("routed_experts_start_len", 0) for one in server.asked] == [0, 6, 9]
    assert buffer.known_experts == len(buffer) - 1


def test_a_client_without_experts_asks_for_none() -> None:
    server = Mixture([])
    buffer = play(server, [2], experts=None)
    assert "return_routed_experts" not in server.asked[0]
    assert buffer.experts.size == 0


SPOILS = {
    "a position too few": lambda rows: rows[:-1].tobytes(),
    "a position too many": lambda rows: np.concatenate([rows, rows[:1]]).tobytes(),
    "half an integer": lambda rows: rows.tobytes()[:-2],
    "an expert beyond the last": lambda rows: (rows * 0 + MODEL.count).tobytes(),
    "a negative expert": lambda rows: (rows * 0 - 1).tobytes(),
    "memory that was never written": lambda rows: (rows * 0).tobytes(),
}


@pytest.mark.parametrize("spoils", SPOILS.values(), ids=SPOILS)
def test_experts_that_are_none_are_garbled_and_never_kept(spoils) -> None:
    with pytest.raises(EngineLost, match=r"4 sends failed.*_Garbled.*experts"):
        play(Mixture([], spoils), [1])


def test_a_server_without_the_flag_is_named_as_such() -> None:
    class Plain(Mixture):
        async def handle(self, request: web.Request) -> web.Response:
            answer = json.loads((await super().handle(request)).text or "")
            del answer["meta_info"]["routed_experts"]
            return web.json_response(answer)

    with pytest.raises(EngineLost, match="its server lacks --enable-return-routed-experts"):
        play(Plain([]), [1])


def test_more_experts_than_tokens_were_computed_are_refused() -> None:
    buffer = TokenBuffer([1, 2])
    reply = Generation(
        token_ids=(), logprobs=(), versions=(), finish="stop", cached_tokens=0, engine="e",
        experts=np.zeros((2, 3, 2), np.uint8),
    )  # fmt: skip
    with pytest.raises(ValueError, match="e gave experts of 2 positions in a sequence of 2 tokens"):
        buffer.append_sampled(reply)


def test_a_trajectory_of_which_some_experts_are_missing_has_none() -> None:
    buffer = play(Mixture([(500, True, False)]), [1])  # the budget ends in the aborted part
    assert len(buffer) == 504
    assert buffer.experts.size == 0


def write_config(folder: Path, **changes: object) -> Path:
    known = {
        "model_type": "qwen3_moe", "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 9,
        "num_attention_heads": 2, "moe_intermediate_size": 4, "intermediate_size": 4,
        "num_experts": 300, "num_experts_per_tok": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(known | changes))
    return folder


def test_a_models_experts_are_read_from_its_config(tmp_path) -> None:
    assert read_experts(write_config(tmp_path)) == MODEL
    assert MODEL.token_bytes == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "is a qwen3 without experts; set false"),
        ({"num_experts": 1 << 16}, "needs 1 to 32768 experts"),
        ({"num_experts_per_tok": 301}, "no more a token than there are"),
        ({"mlp_only_layers": [0]}, "every layer must have experts"),
        ({"model_type": "mixtral"}, "known are llama, qwen3, qwen3_moe"),
    ],
)
def test_a_model_whose_experts_cannot_be_replayed_is_refused(tmp_path, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        read_experts(write_config(tmp_path, **changes))


def test_a_group_that_could_not_be_handed_on_with_its_experts_is_refused(tmp_path) -> None:
    config = RunConfig()
    config.model.path, config.engine.sglang.routed_experts = str(write_config(tmp_path)), True
    assert replayed_experts(config) == MODEL
    config.rollout.attempts_per_task, config.agent.tokens_per_trajectory = 100, 1 << 20
    config.handoff = "socket"
    with pytest.raises(ConfigError, match=r"12 bytes a token .*handoff=socket takes 1073741824"):
        replayed_experts(config)
    config.handoff = "files"
    assert replayed_experts(config) == MODEL


def test_a_folder_without_a_config_says_what_is_wanted(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: .*give the folder"):
        read_experts(tmp_path)
