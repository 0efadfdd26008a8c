"""Whether the watchers leave a well engine alone: half an hour of long prompts, pauses and pushes.

    python -m benchmarks.engine_calm [--minutes 30] [--engine embedded] [--out FILE] [KEY=VALUE …]

One supervised engine on a random model. Callers ask for prompts of a few to some thousand tokens,
with idle time between them. Every --every-s seconds weights change, in turn from disk, by a
collective push, and by a push whose sender is late by half as much again as engine.hang_s, so that
the engine stands paused for longer than a hang may last. An engine that is ended is a false alarm:
`faults` must be empty. KEY=VALUE are keys of the engine section, as hang_s=10.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config import EngineConfig
from agentrl.engine.base import Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.loaded import read_tensors
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.events import EngineFault, Event, NoEvents
from agentrl.weights.push import tell_members
from agentrl.weights.pusher import Pusher
from agentrl.weights.version import publish_version
from benchmarks.engine_recovery import engine_config, header

WAYS = ("disk", "collective", "late collective")
CALLERS = 3
LATE = 1.5
"""A late sender comes after that many times engine.hang_s."""
CONTEXT = 4096
VOCABULARY = 512
PUSH_S = 300.0


class Faults(NoEvents):
    """Keeps why an engine was ended, and how often a request was sent again."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.details: list[str] = []

    def write(self, event: Event) -> None:
        if isinstance(event, EngineFault):
            self.causes[event.cause] += 1
            self.details.append(f"{event.cause}: {event.detail[:300]}")
            print(self.details[-1], flush=True)


@dataclass(kw_only=True)
class Calm:
    config: EngineConfig
    folder: Path
    every_s: float
    faults: Faults = field(default_factory=Faults)
    calls: Counter[str] = field(default_factory=Counter)
    longest_s: dict[str, float] = field(default_factory=dict)
    """By what was asked for."""
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each change of weights, by way."""

    async def run(self, minutes: float) -> dict[str, Any]:
        model = await asyncio.to_thread(make_model, self.folder / "model")
        supervisor = EngineSupervisor(
            self.config, model=model, logs=self.folder / "logs", events=self.faults
        )
        try:
            await supervisor.start(None)
            print("started", flush=True)
            until = time.monotonic() + 60 * minutes
            client = EngineClient(
                supervisor.urls, self.config, self.faults, weights=supervisor.weights
            )
            async with client, asyncio.TaskGroup() as tasks:
                for number in range(CALLERS):
                    tasks.create_task(self._ask(client, number, until))
                tasks.create_task(self._change(supervisor, model, until))
        finally:
            await supervisor.close()
        return {
            "minutes": minutes,
            "hang_s": self.config.hang_s,
            "faults": {name: n for name, n in self.faults.causes.items() if name != "request"},
            "requests_sent_again": self.faults.causes["request"],
            "details": self.faults.details[:20],
            "calls": dict(self.calls),
            "longest_call_s": self.longest_s,
            "changes_s": self.pauses_s,
            "load_average": os.getloadavg(),
        }

    async def _ask(self, client: EngineClient, number: int, until: float) -> None:
        """Ask for short and long prompts in turn, each caller at its own pace."""
        random = Random(number)
        while time.monotonic() < until:
            kind, size, new = random.choice(
                [("long prompt", random.randint(1500, 3900), 4), ("long reply", 16, 200)]
            )
            ids = [random.randrange(16, VOCABULARY) for _ in range(size)]
            sampling = Sampling(max_new_tokens=new, temperature=1.0)
            began = time.monotonic()
            reply = await client.generate(ids, sampling, trajectory=f"{number}")
            if len(reply.token_ids) != len(reply.logprobs) or not reply.token_ids:
                raise SystemExit(f"a reply to a {kind} is not whole: {reply}")
            self.calls[kind] += 1
            took = time.monotonic() - began
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), took)
            await asyncio.sleep(random.uniform(1, 12))

    async def _change(self, supervisor: EngineSupervisor, model: Path, until: float) -> None:
        base = dict(read_tensors(model))
        pusher = Pusher(
            run_dir=self.folder, attempt=1, address="127.0.0.1", device=torch.device("cpu"),
            timeout_s=PUSH_S, bucket_bytes=100_000,
        )  # fmt: skip
        try:
            for version in count(1):
                await asyncio.sleep(self.every_s)
                if time.monotonic() > until:
                    return
                way = WAYS[version % len(WAYS)]
                tensors = {name: one * (1 + version / 64) for name, one in base.items()}
                began = time.monotonic()
                await self._take(supervisor, pusher, way=way, version=version, tensors=tensors)
                took = round(time.monotonic() - began, 2)
                self.pauses_s.setdefault(way, []).append(took)
                print(
                    f"version {version}, {way}: {took} s; faults {dict(self.faults.causes)}",
                    flush=True,
                )
        finally:
            pusher.close()

    async def _take(
        self,
        supervisor: EngineSupervisor,
        pusher: Pusher,
        *,
        way: str,
        version: int,
        tensors: dict[str, torch.Tensor],
    ) -> None:
        push = None
        if way != "disk":
            tell_members(self.folder / "attempts" / "0001", 0, supervisor.members())
            push = pusher.announce(version, tensors)
        announced = publish_version(
            self.folder / "weights", run="calm", attempt=1, version=version, step=version,
            tensors=tensors.items(), model_folder=self.folder / "model", consumed=[],
            transport="disk" if push is None else "collective",
        )  # fmt: skip
        update = asyncio.create_task(supervisor.update(announced))
        if push is not None:
            await asyncio.sleep(LATE * self.config.hang_s if way.startswith("late") else 0)
            why = await asyncio.to_thread(pusher.send, push, tensors.items())
            if why:
                self.faults.details.append(f"push of version {version}: {why}")
        await update


def make_model(folder: Path) -> Path:
    """Write a small random model with room for long prompts."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        max_position_embeddings=CONTEXT, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engine", default="embedded", help="a preset of configs/engines")
    parser.add_argument("--every-s", type=float, default=45.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args()
    keys = [f"context_length={CONTEXT}", "max_running=4", "request_timeout_s=300", *given.keys]
    with tempfile.TemporaryDirectory() as folder:
        calm = Calm(
            config=engine_config(given.engine, keys), folder=Path(folder), every_s=given.every_s
        )
        found = asyncio.run(calm.run(given.minutes))
    text = json.dumps({**header("engine_calm"), **found}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
