"""How fast a running engine takes new weights, by disk and by a group, against plain copies.

    python -m benchmarks.engine_push --model FOLDER [--engine sglang] [--out FILE] [KEY=VALUE …]

Each way takes other values of the same tensors to one engine under load, `--times` times: paused,
received, proved by its hashes, resumed, as in a run; `seconds` is all of that, `parts` the time in
each request. `disk`: published as a version, then read by the engine. `gloo`, `nccl`: broadcast
from this process, which stands for the trainer; where there is one GPU both ends of `nccl` are on
it, and go over sockets: that shows that the way works, not how fast it is.
Ratios: bytes a second of the receiving request over a plain read of the same file (disk), or a
plain copy of as many bytes from one GPU to another, on one GPU within it (nccl).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentrl.config import EngineConfig
from agentrl.engine.admin import EngineAdmin, open_session
from agentrl.engine.client import EngineClient
from agentrl.engine.devices import EngineShare
from agentrl.engine.loaded import read_tensors
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.startup import Start, launch, wait_until_ready
from agentrl.events import NoEvents
from agentrl.weights.push import tell_members
from agentrl.weights.pusher import Pusher
from agentrl.weights.version import Announced, publish_version
from benchmarks.engine_flow import Round
from benchmarks.engine_recovery import engine_config, header, one_of

BUCKET_BYTES = 512 << 20
PUSH_S = 60.0
WAYS = ("disk", "gloo", "nccl")


class TimedAdmin(EngineAdmin):
    """Adds up the seconds of each request."""

    seconds: dict[str, float]

    async def _post(self, path: str, body: object) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return await super()._post(path, body)
        finally:
            self.seconds[path] = self.seconds.get(path, 0.0) + time.perf_counter() - began


@dataclass(kw_only=True)
class Bench:
    config: EngineConfig
    model: Path
    folder: Path
    vocabulary: int
    times: int
    version: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    async def measure(self, ways: list[str]) -> dict[str, Any]:
        tensors = dict(read_tensors(self.model))
        size = sum(one.nbytes for one in tensors.values())
        found: dict[str, Any] = {"bytes": size, "tensors": len(tensors)}
        async with open_session() as session:
            start = Start(
                index=0, announced=None, log=self.folder / "engine-0.log", share=EngineShare()
            )
            process, ready = await launch(self.config, self.model, start)
            try:
                wait_s = self.config.start_timeout_s
                url = await wait_until_ready(session, process, ready, timeout_s=wait_s)
                admin = TimedAdmin(session, url, update_timeout_s=PUSH_S)
                admin.seconds = {}
                weights = EngineWeights(
                    name="engine-0", admin=admin, able=await admin.capabilities(),
                    pause_mode=self.config.pause_mode, reports=Reports(NoEvents()),
                    loaded=STARTING_MODEL,
                )  # fmt: skip
                found["engine"] = weights.able.name
                await weights.reach(lambda: None)
                async with EngineClient(
                    lambda: [] if weights.is_paused else [url], self.config
                ) as client:
                    for way in ways:
                        found[way] = await self._way(way, weights, admin, client, tensors)
                        print(way, json.dumps(found[way]), flush=True)
            finally:
                await process.kill()
        found["plain"] = plain(size, self.folder / "weights")
        return found

    async def _way(
        self, way: str, weights: EngineWeights, admin: TimedAdmin, client: EngineClient, base: Any
    ) -> list[dict[str, Any]]:
        tell_members(self.folder / "attempts" / "0001", 0, {"engine-0": admin.url})
        device = torch.device("cpu")
        if way == "nccl":
            device = torch.device("cuda", torch.cuda.device_count() - 1)
        pusher = Pusher(
            run_dir=self.folder, attempt=1, address="127.0.0.1", device=device,
            timeout_s=PUSH_S, bucket_bytes=BUCKET_BYTES,
        )  # fmt: skip
        rounds = []
        for _ in range(self.times):
            self.version += 1
            tensors = {
                name: (one.float() * (1 + self.version / 16)).to(one.dtype).to(device)
                for name, one in base.items()
            }
            rounds.append(await self._once(way, pusher, weights, client, tensors))
            if rounds[-1]["failed"]:
                break
        pusher.close()
        return rounds

    async def _once(
        self, way: str, pusher: Pusher, weights: EngineWeights, client: EngineClient, tensors: Any
    ) -> dict[str, Any]:
        admin = weights.admin
        assert isinstance(admin, TimedAdmin)
        push = None if way == "disk" else pusher.announce(self.version, tensors)
        announced = self._publish(tensors, "disk" if push is None else "collective")
        load = Round(count=32, turns=1, prompt=128, new=256, vocabulary=self.vocabulary)
        calls = asyncio.create_task(load.run(client, self.version))
        await asyncio.sleep(0.5)
        admin.seconds.clear()
        began, why = time.perf_counter(), ""
        reached = asyncio.create_task(weights.reach(lambda: announced))
        if push is not None:
            why = await asyncio.to_thread(pusher.send, push, tensors.items())
        await reached
        seconds = time.perf_counter() - began
        await calls
        size = sum(one.nbytes for one in tensors.values())
        path = "/update_weights_from_d" + ("isk" if push is None else "istributed")
        return {
            "failed": why,
            "seconds": seconds,
            "gb_per_s": size / seconds / 1e9,
            "receive_gb_per_s": size / admin.seconds.get(path, float("inf")) / 1e9,
            "parts": {name: round(one, 4) for name, one in admin.seconds.items()},
        }

    def _publish(self, tensors: dict[str, torch.Tensor], transport: str) -> Announced:
        return publish_version(
            self.folder / "weights", run="bench", attempt=1, version=self.version,
            step=self.version, tensors=tensors.items(), model_folder=self.model, consumed=[],
            transport=transport,
        )  # fmt: skip


def plain(size: int, weights: Path) -> dict[str, float]:
    """Return the rates, in GB/s, of what a push can at best be."""
    files = sorted(weights.glob("v*/*.safetensors"))[-1:]
    rates = {"read_gb_per_s": size / min(_read(files) for _ in range(3)) / 1e9}
    if torch.cuda.is_available():
        here = torch.empty(size, dtype=torch.uint8, device="cuda:0").random_()
        there = torch.empty_like(here, device=f"cuda:{torch.cuda.device_count() - 1}")
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        rates["copy_gb_per_s"] = size / min(_copy(here, there) for _ in range(5)) / 1e9
        rates["host_copy_gb_per_s"] = size / min(_copy(host, here) for _ in range(5)) / 1e9
    return rates


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    torch.cuda.synchronize(target.device)
    began = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize(target.device)
    return time.perf_counter() - began


def _read(files: list[Path]) -> float:
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="sglang", help="a preset of configs/engines")
    parser.add_argument("--ways", type=one_of(WAYS), default=WAYS, help=",".join(WAYS))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args()
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang sets it, and both ends must
    config = engine_config(given.engine, given.keys)
    if torch.cuda.device_count() == 1:  # NCCL refuses two ranks of one host on one GPU
        os.environ["NCCL_HOSTID"] = "trainer"
        config.sglang.environment["NCCL_HOSTID"] = "engine"
    vocabulary = int(json.loads((given.model / "config.json").read_text())["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            config=config, model=given.model, folder=Path(folder),
            vocabulary=vocabulary, times=given.times,
        )  # fmt: skip
        found = asyncio.run(bench.measure(given.ways))
    text = json.dumps({**header("engine_push"), **found}, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
