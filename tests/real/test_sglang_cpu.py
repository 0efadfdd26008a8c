"""The real SGLang on a CPU, under our supervisor: served, updated, hung and killed.

SGLANG_PYTHON names an interpreter that has SGLang; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from agentrl import events
from agentrl.config import EngineConfig, load
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.loaded import read_tensors
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.tasks.model_init import make_tokenizer
from agentrl.weights.version import Announced, publish_version

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no interpreter with SGLang"),
]
TOLERANCE = 1e-3
"""Nats, between SGLang and transformers' own forward, both in float32."""
COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
KINDS = {
    "dense": lambda: Qwen3Config(**COMMON, intermediate_size=256),
    "moe": lambda: Qwen3MoeConfig(
        **COMMON, intermediate_size=256, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True,
    ),
}  # fmt: skip


def make(folder: Path, kind: str, seed: int) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind]())
    model.save_pretrained(folder)
    make_tokenizer([Path(__file__).read_text()], 400).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch_dtype": "float32"}))
    return folder


def scorer(folder: Path) -> Callable[[list[int], int], list[float]]:
    """Log-probabilities by transformers' own forward."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(tokens: list[int], start: int) -> list[float]:
        with torch.no_grad():
            table = torch.log_softmax(whole(torch.tensor([tokens])).logits[0], -1)
        return [float(table[at - 1, tokens[at]]) for at in range(start, len(tokens))]

    return score


class Case:
    """One supervised SGLang and what a test needs of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.first, self.second = (make(folder / f"m{seed}", kind, seed) for seed in (0, 1))
        keys = [
            *("engine=sglang-cpu", f"engine.sglang.python={PYTHON}", "engine.hang_s=20"),
            *("engine.sglang.dtype=float32", "engine.context_length=1024"),
        ]
        self.config: EngineConfig = load("configs/demo.yaml", keys).engine
        self.supervisor: EngineSupervisor
        self.client: EngineClient

    def announce(self, source: Path, version: int) -> Announced:
        return publish_version(
            self.folder / "weights", run="t", attempt=1, version=version, step=version,
            tensors=read_tensors(source), model_folder=source, consumed=[],
        )  # fmt: skip

    async def ask(self, prompt: list[int], new: int) -> Generation:
        sampling = Sampling(max_new_tokens=new, temperature=1.0)
        return await self.client.generate(prompt, sampling, trajectory=str(prompt))

    def run(self) -> list[events.AnyEvent]:
        asyncio.run(self._run())
        return events.read_folder(self.folder / "events")

    async def _run(self) -> None:
        writer = events.EventWriter(self.folder / "events", "inference")
        self.supervisor = EngineSupervisor(
            self.config, model=self.first, logs=self.folder / "logs", events=writer
        )
        try:
            await self.supervisor.start(self.announce(self.first, 0))
            async with EngineClient(
                self.supervisor.urls, self.config, writer, weights=self.supervisor.weights
            ) as self.client:
                await self.body()
        finally:
            await self.supervisor.close()
            writer.close()

    async def body(self) -> None:
        await self.check_logprobs(self.first, version=0)
        await self.check_update()
        await self.check_logprobs(self.second, version=1)
        await self.check_fault(signal.SIGSTOP)
        await self.check_fault(signal.SIGKILL)
        await self.check_logprobs(self.second, version=1)

    async def check_logprobs(self, model: Path, *, version: int) -> None:
        prompt = [40, 41, 42, 43]
        got = await self.ask(prompt, 24)
        expected = scorer(model)([*prompt, *got.token_ids], len(prompt))
        assert max(abs(a - b) for a, b in zip(got.logprobs, expected, strict=True)) < TOLERANCE
        assert {span.version for span in got.versions} == {version}

    async def check_update(self) -> None:
        """One request lives through the update; its spans say which tokens are whose."""
        call = asyncio.create_task(self.ask([7, 8, 9], 400))
        await asyncio.sleep(1)
        await self.supervisor.update(self.announce(self.second, 1))
        got = await call
        ends = [0, *(span.end for span in got.versions)]
        assert [span.start for span in got.versions] == ends[:-1]
        assert ends[-1] == len(got.token_ids) == len(got.logprobs)
        assert {span.version for span in got.versions} <= {0, 1}

    async def check_fault(self, number: signal.Signals) -> None:
        calls = [asyncio.create_task(self.ask([20 + at, 5], 200)) for at in range(4)]
        await asyncio.sleep(1)
        process = self.supervisor._keepers[0].process
        assert process is not None
        for one in psutil.Process(process.pid).children(recursive=True):
            one.send_signal(number)
        replies = await asyncio.gather(*calls)
        assert all(len(one.token_ids) == len(one.logprobs) > 0 for one in replies)


@pytest.fixture(params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(tmp_path, request.param)


def test_it_serves_takes_new_weights_and_survives_a_hang_and_a_kill(case: Case) -> None:
    happened = case.run()
    faults = [one for one in happened if isinstance(one, events.EngineFault)]
    assert [one.cause for one in faults if one.cause != "request"][:1] == ["hang"]
    assert sum(one.cause != "request" for one in faults) == 2
    assert [one.version for one in happened if isinstance(one, events.VersionEvent)] == [0, 1, 1, 1]
    assert any(isinstance(one, events.EngineMetrics) for one in happened)


def test_every_flag_that_we_write_is_one_of_its(tmp_path: Path) -> None:
    asked = [PYTHON, "-m", "sglang.launch_server", "--help"]
    known = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    golden = Path(__file__).parents[1] / "engine" / "golden"
    flags = {
        line.split()[0] for path in golden.glob("sglang_*.txt") for line in path.open() if line
    }
    assert {flag for flag in flags if f"{flag} " not in known.replace(",", " ")} == set()
