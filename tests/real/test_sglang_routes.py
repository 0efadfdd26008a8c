"""Experts as the real SGLang tells them, over turns, an abort and an update; and replayed.

Its routers sit on near ties: float32's rounding decides, elsewhere otherwise than in the engine.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sglang_cpu import PYTHON, TOLERANCE, make, mixture_of, pytestmark

from agentrl import events
from agentrl.agent.tokens import TokenBuffer
from agentrl.config import RunConfig, load
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.loaded import read_tensors
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.handoff.replayed import replayed_experts
from agentrl.training.packing import Sample, join
from agentrl.training.torch_backend import TorchBackend
from agentrl.weights.version import publish_version
from benchmarks.tiny_run import model_of, prepared
from launch.cli import main as agentrl

__all__ = ["pytestmark"]
PROMPT = list(range(40, 60))


def undecided(folder: Path, seed: int) -> Path:
    """Make a mixture whose routers give all experts of a layer nearly the same chance."""
    make(folder, "moe", seed)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(tensor.shape, generator=torch.manual_seed(seed))
            tensors[name] = tensor[:1] + 1e-8 * noise
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class Played:
    """What one supervised engine answered to a few trajectories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first, self.second = (undecided(folder / f"m{seed}", seed) for seed in (0, 1))
        keys = [f"engine.sglang.python={PYTHON}", "engine.sglang.routed_experts=true"]
        keys += ["engine=sglang-cpu", "engine.context_length=1024", f"model.path={self.first}"]
        self.config: RunConfig = load("configs/demo.yaml", keys)
        self.supervisor: EngineSupervisor
        self.client: EngineClient
        asyncio.run(self._run())

    async def _run(self) -> None:
        writer = events.EventWriter(self.folder / "events", "inference")
        config = self.config.engine
        self.supervisor = EngineSupervisor(
            config, model=self.first, logs=self.folder / "logs", events=writer
        )
        try:
            await self.take(self.first, 0)
            async with EngineClient(
                self.supervisor.urls, config, writer, weights=self.supervisor.weights,
                experts=replayed_experts(self.config),
            ) as self.client:  # fmt: skip
                self.turns = await self.talk(TokenBuffer(PROMPT))
                self.aborted = await self.talk(TokenBuffer(PROMPT[::-1]), aborts=True)
                self.aborts = await asyncio.to_thread(self.count_aborts)
                self.updated = await self.live_through_an_update(TokenBuffer(PROMPT[::2]))
        finally:
            await self.supervisor.close()
            writer.close()

    async def take(self, source: Path, version: int) -> None:
        announced = publish_version(
            self.folder / "weights", run="t", attempt=1, version=version, step=version,
            tensors=read_tensors(source), model_folder=source, consumed=[],
        )  # fmt: skip
        await (self.supervisor.update if version else self.supervisor.start)(announced)

    async def ask(self, buffer: TokenBuffer, new: int) -> Generation:
        sampling = Sampling(max_new_tokens=new, temperature=1.0, experts_from=buffer.known_experts)
        reply = await self.client.generate(buffer.tokens, sampling, trajectory="t")
        buffer.append_sampled(reply)
        return reply

    async def talk(self, buffer: TokenBuffer, *, aborts: bool = False) -> TokenBuffer:
        """Take three turns, in the second of which everything is aborted, twice."""
        await self.ask(buffer, 16)
        buffer.append_context([5, 6, 7])
        second = asyncio.create_task(self.ask(buffer, 150 if aborts else 16))
        for _ in range(2 if aborts else 0):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(self.abort_all)
        await second
        buffer.append_context([9] * 12)
        assert (await self.ask(buffer, 16)).cached_tokens > 0
        return buffer

    def abort_all(self) -> None:
        (url,) = self.supervisor.urls()
        body = json.dumps({"abort_all": True}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/abort_request", body, kind)
        urllib.request.urlopen(request, timeout=30).close()

    def count_aborts(self) -> float:
        (url,) = self.supervisor.urls()
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        name = "sglang:num_aborted_requests_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def live_through_an_update(self, buffer: TokenBuffer) -> TokenBuffer:
        reply = asyncio.create_task(self.ask(buffer, 300))
        await asyncio.sleep(1)
        await self.take(self.second, 1)
        await reply
        buffer.append_context([8, 8])
        await self.ask(buffer, 16)
        return buffer

    def gaps(self, buffer: TokenBuffer, *, replays: bool) -> np.ndarray:
        """Return |trainer − engine| of each sampled token, nats."""
        sample = Sample(
            tokens=np.asarray(buffer.tokens, np.int32),
            loss_mask=np.asarray(buffer.loss_mask),
            engine_logprobs=np.asarray(buffer.logprobs, np.float32),
            advantage=1.0,
            experts=buffer.experts if replays else None,
        )
        batch = join([sample])
        found = TorchBackend(self.first, self.config).logprobs(batch)
        return (found - batch.engine_logprobs).abs().numpy()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("name", ["turns", "aborted", "updated"])
def test_every_position_but_the_last_has_its_experts(played: Played, name: str) -> None:
    buffer: TokenBuffer = getattr(played, name)
    assert buffer.known_experts == len(buffer) - 1
    assert buffer.experts.shape == (len(buffer), 2, 2)
    assert (buffer.experts[:, :, 0] != buffer.experts[:, :, 1]).all()


@pytest.mark.parametrize("name", ["turns", "aborted"])
def test_replay_closes_the_gap_that_near_ties_open(played: Played, name: str) -> None:
    buffer: TokenBuffer = getattr(played, name)
    replayed, free = (played.gaps(buffer, replays=replays) for replays in (True, False))
    assert replayed.max() < TOLERANCE
    assert free.max() > 10 * TOLERANCE
    assert free.mean() > 10 * replayed.mean()


def test_the_aborts_came_in_the_middle_of_a_reply(played: Played) -> None:
    assert played.aborts >= 1


def test_the_update_came_in_the_middle_of_a_reply(played: Played) -> None:
    versions = [span.version for span in played.updated.versions]
    assert versions[0] == 0
    assert versions[-1] == 1


def test_a_run_replays_what_its_engines_took(tmp_path: Path) -> None:
    """The demo's loop, from the engines' answers over the spool to the trainer's routers."""
    config = prepared(tmp_path / "rl")
    model = mixture_of(model_of(config), tmp_path / "moe")
    keys = [f"model.path={model}", "name=replayed", "training.steps=2"]
    engine = ["engine=sglang-cpu", f"engine.sglang.python={PYTHON}"]
    engine += ["engine.sglang.routed_experts=true"]
    assert agentrl(["train", str(config), *engine, *keys]) == 0
    happened = events.read_folder(config.parent / "runs" / "replayed" / "events")
    steps = [one.metrics for one in happened if isinstance(one, events.Step)]
    assert len(steps) == 2
    for metrics in steps:
        assert 0 <= metrics["rerouted"] < 0.05
        assert metrics.get("gap_age_0", 0.0) < TOLERANCE
        assert not [name for name in metrics if name.endswith("_experts")]
