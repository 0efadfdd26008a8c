"""The real SGLang on a CPU, under our supervisor: served, updated, hung, killed, and trained with.

`make test-sglang` installs it and runs these; else they are skipped. SGLANG_PYTHON names another
interpreter that has it. An engine takes 40 s to start on two idle cores, and a test starts several.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from processes import words
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from agentrl import events
from agentrl.config import EngineConfig, load
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.loaded import read_tensors
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.tasks.model_init import make_tokenizer
from agentrl.weights.push import tell_members
from agentrl.weights.pusher import Pusher
from agentrl.weights.version import Announced, publish_version
from benchmarks.tiny_run import model_of, prepared
from launch.cli import main as agentrl

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no SGLang here: make test-sglang"),
]
HANG_S = 20
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
            *("engine=sglang-cpu", f"engine.sglang.python={PYTHON}", "engine.context_length=1024"),
            "engine.max_restarts=9",  # of six faults within minutes
            f"engine.hang_s={HANG_S}",
        ]
        self.config: EngineConfig = load("configs/demo.yaml", keys).engine
        self.supervisor: EngineSupervisor
        self.client: EngineClient

    def announce(self, source: Path, version: int, transport: str = "disk") -> Announced:
        return publish_version(
            self.folder / "weights", run="t", attempt=1, version=version, step=version,
            tensors=read_tensors(source), model_folder=source, consumed=[], transport=transport,
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
        await self.check_update(self.second, 1, "disk")
        await self.check_logprobs(self.second, version=1)
        await self.check_update(self.first, 2, "collective")
        await self.check_logprobs(self.first, version=2)
        for stop in (self.hang, self.mute, self.deafen, self.die_slowly):
            await self.check_fault(stop, within_s=1.5 * HANG_S)  # of a machine that others use too
        for end in (self.abort, self.kill):
            await self.check_fault(end, within_s=HANG_S)
        await self.check_logprobs(self.first, version=2)

    async def check_logprobs(self, model: Path, *, version: int) -> None:
        prompt = [40, 41, 42, 43]
        got = await self.ask(prompt, 24)
        expected = scorer(model)([*prompt, *got.token_ids], len(prompt))
        assert max(abs(a - b) for a, b in zip(got.logprobs, expected, strict=True)) < TOLERANCE
        assert {span.version for span in got.versions} == {version}

    async def check_update(self, source: Path, version: int, transport: str) -> None:
        """One request lives through the update; its spans say which tokens are whose."""
        call = asyncio.create_task(self.ask([7, 8, 9], 400))
        await asyncio.sleep(1)
        assert await self.update(source, version, transport) == ""
        got = await call
        ends = [0, *(span.end for span in got.versions)]
        assert [span.start for span in got.versions] == ends[:-1]
        assert ends[-1] == len(got.token_ids) == len(got.logprobs)
        assert {span.version for span in got.versions} <= {version - 1, version}

    async def update(self, source: Path, version: int, transport: str) -> str:
        """Announce and take weights; return why a push failed."""
        if transport == "disk":
            await self.supervisor.update(self.announce(source, version))
            return ""
        tensors = dict(read_tensors(source))
        tell_members(self.folder / "attempts" / "0001", 0, self.supervisor.members())
        pusher = Pusher(
            run_dir=self.folder, attempt=1, address="127.0.0.1", device=torch.device("cpu"),
            timeout_s=300, bucket_bytes=200_000,
        )  # fmt: skip
        push = pusher.announce(version, tensors)
        assert push is not None
        assert len(push.buckets) > 1
        announced = self.announce(source, version, transport)
        update = asyncio.create_task(self.supervisor.update(announced))
        why = await asyncio.to_thread(pusher.send, push, tensors.items())
        await update
        pusher.close()
        return why

    def processes(self) -> list[psutil.Process]:
        """The server's: the first is the one with the port."""
        process = self.supervisor._keepers[0].process
        assert process is not None
        return psutil.Process(process.pid).children(recursive=True)

    def stop(self, name: str) -> None:
        found = [one for one in self.processes() if name in " ".join(words(one))]
        assert found
        for one in found:
            one.send_signal(signal.SIGSTOP)

    def hang(self) -> None:
        """Its port answers, /v1/loads too; no token comes."""
        self.stop("scheduler")

    def mute(self) -> None:
        """Its scheduler goes on and finishes all requests; nobody hears of it."""
        self.stop("detokenizer")

    def deafen(self) -> None:
        """Its scheduler has nothing more to do, and its port takes connections."""
        self.stop("launch_server")

    def die_slowly(self) -> None:
        """Its port is open and every call times out."""
        for one in self.processes():
            one.send_signal(signal.SIGSTOP)

    def abort(self) -> None:
        """As the driver of an AMD GPU ends a process."""
        with (self.folder / "logs" / "engine-0.log").open("a") as log:
            log.write("Memory access fault by GPU node-4 (Agent handle: 0x1) on address 0x7e.\n")
        self.processes()[-1].send_signal(signal.SIGABRT)

    def kill(self) -> None:
        for one in self.processes():
            one.kill()

    async def check_fault(self, fault: Callable[[], None], *, within_s: float) -> None:
        """It is noticed, and every call in flight is finished, by the engine's next life."""
        calls = [asyncio.create_task(self.ask([20 + at, 5], 200)) for at in range(4)]
        await asyncio.sleep(1)
        fault()
        async with asyncio.timeout(within_s):
            while self.supervisor.urls():  # noqa: ASYNC110 - it has no event for this
                await asyncio.sleep(0.05)
        replies = await asyncio.gather(*calls)
        assert all(len(one.token_ids) == len(one.logprobs) > 0 for one in replies)


@pytest.fixture(params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(tmp_path, request.param)


def test_it_serves_takes_new_weights_and_survives_every_kind_of_end(case: Case) -> None:
    happened = case.run()
    faults = [one for one in happened if isinstance(one, events.EngineFault)]
    causes = [one.cause for one in faults if one.cause != "request"]
    assert causes[:5] == ["hang", "unresponsive", "hang", "hang", "memory_access"]
    assert len(causes) == 6
    proved = [one.version for one in happened if isinstance(one, events.VersionEvent)]
    assert proved == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert any(isinstance(one, events.EngineMetrics) for one in happened)
    failed = [one for one in happened if getattr(one, "state", "").startswith("push failed")]
    assert failed == []


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's config at a size for two cores, prepared and fine-tuned."""
    return prepared(tmp_path_factory.mktemp("rl"))


@pytest.mark.parametrize(("kind", "weights"), [("dense", "disk"), ("moe", "collective")])
def test_reinforcement_learning_takes_steps_with_it(
    config: Path, tmp_path: Path, kind: str, weights: str
) -> None:
    """The demo's loop: the trainer's log-probabilities of fresh tokens are the engine's."""
    model = model_of(config)
    if kind == "moe":
        model = mixture_of(model, tmp_path / "moe")
    keys = [f"model.path={model}", f"weights={weights}", f"name={kind}", "training.steps=3"]
    engine = ["engine=sglang-cpu", f"engine.sglang.python={PYTHON}", "training.checkpoint_every=9"]
    assert agentrl(["train", str(config), *engine, *keys]) == 0
    happened = events.read_folder(config.parent / "runs" / kind / "events")
    steps = [one for one in happened if isinstance(one, events.Step)]
    assert [one.step for one in steps] == [1, 2, 3]
    fresh = [gap for one in steps if (gap := one.metrics.get("gap_age_0")) is not None]
    assert fresh
    assert max(fresh) < TOLERANCE
    found = [one for one in happened if isinstance(one, events.VersionEvent)]
    proved = [one.version for one in found if one.phase == "proved"]
    assert proved == sorted(proved)
    assert {1, 2} <= set(proved)


def mixture_of(dense: Path, folder: Path) -> Path:
    """Make a mixture of experts that says what `dense` says: its experts are all that one's.

    Its head is a tensor of its own: SGLang's Qwen3-MoE reads none out of tied embeddings.
    """
    shutil.copytree(dense, folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = json.loads((dense / "config.json").read_text()) | {"tie_word_embeddings": False}
    mixture = Qwen3MoeConfig(
        **{name: value for name, value in config.items() if name not in ("model_type", "dtype")},
        moe_intermediate_size=config["intermediate_size"], dtype="float32", **experts,
    )  # fmt: skip
    mixture.architectures = ["Qwen3MoeForCausalLM"]
    mixture.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    # SGLang reads some keys by names that transformers no longer writes, as rope_theta
    written = {**config, **written, "num_experts": experts["num_experts"]}
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {}
    for name, tensor in read_tensors(dense):
        if name == "model.embed_tokens.weight":
            tensors["lm_head.weight"] = tensor.clone()
        before, mlp, part = name.partition(".mlp.")
        for expert in range(4) if mlp else ():
            tensors[f"{before}.mlp.experts.{expert}.{part}"] = tensor.clone()
        if mlp:
            router = torch.randn(4, config["hidden_size"], generator=torch.manual_seed(0))
            tensors[f"{before}.mlp.gate.weight"] = 0.1 * router
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_flag_that_we_write_is_one_of_its(tmp_path: Path) -> None:
    asked = [PYTHON, "-m", "sglang.launch_server", "--help"]
    known = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    golden = Path(__file__).parents[1] / "engine" / "golden"
    flags = {
        line.split()[0] for path in golden.glob("sglang_*.txt") for line in path.open() if line
    }
    assert flags - set(re.findall(r"--[a-z0-9-]+", known)) == set()
