"""What the engine supervisor costs, and how long an engine is away: a real engine, real faults.

    python -m benchmarks.engine_recovery --model FOLDER [--engine sglang] [--out FILE] [KEY=VALUE …]

`throughput`: rounds of trajectories of several turns, all at once, through our client; rounds with
every watcher of the supervisor on the same running engine alternate with rounds with none, so that
both share whatever the machine does. Ratio: watched over unwatched, medians.
`faults`: half a round's calls in flight, the server is stopped (SIGSTOP) or killed; `noticed_s` is
until the engine is taken out, `serving_s` until it answers again having proved its weights; `lost`
counts calls that did not end with all their tokens.
`update`: the same tensors with other values, published as a version and taken over from disk.
KEY=VALUE are keys of the engine section, as max_running=128 or sglang.dtype=bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from omegaconf import OmegaConf

from agentrl.config import EngineConfig
from agentrl.config_layers import dotlist, laid_over
from agentrl.engine.admin import EngineAdmin
from agentrl.engine.base import Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.devices import EngineShare
from agentrl.engine.faults import LogReader
from agentrl.engine.loaded import read_tensors
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.startup import Start, launch, wait_until_ready
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.engine.watch import Watch, first_fault
from agentrl.events import NoEvents
from agentrl.weights.version import publish_version

POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round: `count` trajectories at once."""

    count: int
    turns: int
    prompt: int
    new: int
    vocabulary: int

    async def run(self, client: EngineClient, seed: int) -> dict[str, float]:
        """Return its seconds, tokens, requests, and the client's CPU seconds."""
        began, cpu = time.perf_counter(), time.process_time()
        replies = await asyncio.gather(*(self._one(client, seed, at) for at in range(self.count)))
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": sum(replies),
            "tokens_per_s": sum(replies) / seconds,
            "client_cpu_ms_per_request": 1000
            * (time.process_time() - cpu)
            / (self.count * self.turns),
        }

    async def _one(self, client: EngineClient, seed: int, at: int) -> int:
        rng = np.random.default_rng([seed, at])
        ids = rng.integers(16, self.vocabulary, self.prompt).tolist()
        made = 0
        for _ in range(self.turns):
            sampling = Sampling(max_new_tokens=self.new, temperature=1.0)
            reply = await client.generate(ids, sampling, trajectory=f"{seed}-{at}")
            made += len(reply.token_ids)
            ids += [*reply.token_ids, *rng.integers(16, self.vocabulary, 64).tolist()]
        return made


@dataclass(frozen=True, kw_only=True)
class Bench:
    config: EngineConfig
    model: Path
    folder: Path
    shape: Round
    rounds: int

    async def throughput(self, *, graphs: bool = True) -> dict[str, Any]:
        """Alternate rounds with and without the watchers on one engine."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            log = self.folder / f"engine-graphs-{graphs}.log"
            start = Start(index=0, announced=None, log=log, share=EngineShare(), graphs=graphs)
            began = time.perf_counter()
            process, ready = await launch(self.config, self.model, start)
            try:
                url = await wait_until_ready(
                    session, process, ready, timeout_s=self.config.start_timeout_s
                )
                started = time.perf_counter() - began
                admin = EngineAdmin(session, url, update_timeout_s=self.config.start_timeout_s)
                weights = EngineWeights(
                    name="engine-0", admin=admin, able=await admin.capabilities(),
                    pause_mode="abort", reports=Reports(NoEvents()), loaded=STARTING_MODEL,
                )  # fmt: skip
                watch = Watch(
                    weights=weights, process=process, reports=Reports(NoEvents()),
                    hang_s=self.config.hang_s, compile_s=600.0, log=LogReader(),
                )  # fmt: skip
                found = await self._alternate(url, watch)
                found["engine"] = weights.able.name
                found["metrics"] = (await admin.metrics()).splitlines()
            finally:
                await process.kill()
        return {"started_s": started, **found}

    async def _alternate(self, url: str, watch: Watch) -> dict[str, Any]:
        async with EngineClient(lambda: [url], self.config) as client:
            await self.shape.run(client, 0)  # kernels are compiled at first use
            rounds: dict[str, list[dict[str, float]]] = {"watched": [], "unwatched": []}
            for number in range(self.rounds):
                rounds["unwatched"].append(await self.shape.run(client, 2 * number + 1))
                watchers = asyncio.create_task(first_fault(watch.watchers()))
                rounds["watched"].append(await self.shape.run(client, 2 * number + 2))
                if watchers.done():
                    raise RuntimeError(f"a fault was found: {watchers.result()}")
                watchers.cancel()
                await asyncio.gather(watchers, return_exceptions=True)
        medians = {
            name: statistics.median(one["tokens_per_s"] for one in each)
            for name, each in rounds.items()
        }
        return {
            "rounds": rounds,
            "tokens_per_s": medians,
            "ratio": medians["watched"] / medians["unwatched"],
            "longest_stall_s": watch.progress.longest_s,
        }

    async def faults(self) -> dict[str, Any]:
        """Stop and kill a supervised engine under load, and give it new weights in between."""
        supervisor = EngineSupervisor(
            self.config, model=self.model, logs=self.folder / "logs", events=NoEvents()
        )
        try:
            began = time.perf_counter()
            await supervisor.start(None)
            found: dict[str, Any] = {"start_s": time.perf_counter() - began}
            async with EngineClient(
                supervisor.urls, self.config, weights=supervisor.weights
            ) as client:
                found["updates"] = [
                    await self._update(supervisor, client, version) for version in (1, 2)
                ]
                for name in ("SIGSTOP", "SIGKILL"):
                    found[name] = await self._fault(supervisor, client, name)
        finally:
            await supervisor.close()
        return found

    async def _fault(
        self, supervisor: EngineSupervisor, client: EngineClient, name: str
    ) -> dict[str, float]:
        calls = [
            asyncio.create_task(
                client.generate(
                    [17 + at] * self.shape.prompt,
                    Sampling(max_new_tokens=self.shape.new, temperature=1.0),
                    trajectory=f"{name}-{at}",
                )
            )
            for at in range(self.shape.count // 2)
        ]
        await asyncio.sleep(0.3)
        in_flight = sum(not one.done() for one in calls)
        process = supervisor._keepers[0].process
        assert process is not None
        self._signal(process.pid, name)
        began = time.perf_counter()
        await _until(lambda: not supervisor.urls())
        noticed = time.perf_counter() - began
        await _until(lambda: bool(supervisor.urls()) or supervisor.failed is not None)
        serving = time.perf_counter() - began
        replies = await asyncio.gather(*calls, return_exceptions=True)
        whole = [
            not isinstance(one, BaseException)
            and (one.finish == "stop" or len(one.token_ids) == self.shape.new)
            for one in replies
        ]
        return {
            "in_flight": in_flight,
            "noticed_s": noticed,
            "serving_s": serving,
            "lost": len(whole) - sum(whole),
        }

    def _signal(self, pid: int, name: str) -> None:
        """Send to every process of the engine, but to none above it."""
        for one in psutil.Process(pid).children(recursive=True) or [psutil.Process(pid)]:
            one.send_signal(signal.Signals[name])

    async def _update(
        self, supervisor: EngineSupervisor, client: EngineClient, version: int
    ) -> dict[str, Any]:
        tensors = [
            (name, (tensor.float() * (1 + version / 1000)).to(tensor.dtype))
            for name, tensor in read_tensors(self.model)
        ]
        size = sum(tensor.nbytes for _, tensor in tensors)
        announced = publish_version(
            self.folder / "weights", run="bench", attempt=1, version=version, step=version,
            tensors=tensors, model_folder=self.model, consumed=[],
        )  # fmt: skip
        files = sorted(announced.folder.glob("*.safetensors"))
        read_s = min(_timed_read(files) for _ in range(2))
        calls = asyncio.create_task(self.shape.run(client, 990 + version))
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        await supervisor.update(announced)
        seconds = time.perf_counter() - began
        await calls
        reply = await client.generate(
            [17], Sampling(max_new_tokens=4, temperature=1.0), trajectory="v"
        )
        return {
            "bytes": size,
            "seconds": seconds,
            "gb_per_s": size / seconds / 1e9,
            "plain_read_gb_per_s": size / read_s / 1e9,
            "versions": sorted({span.version for span in reply.versions}),
        }


async def _until(claim: Callable[[], bool], *, deadline_s: float = 900.0) -> None:
    for _ in range(int(deadline_s / POLL_S)):
        if claim():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"nothing came of a fault within {deadline_s:g} s")


def _timed_read(files: list[Path]) -> float:
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    return time.perf_counter() - began


def _config(named: str, keys: list[str]) -> EngineConfig:
    below = laid_over(OmegaConf.create(), [f"engine={named}"])
    chosen = OmegaConf.merge(below.get("engine", {}), dotlist(keys))
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EngineConfig), chosen))  # type: ignore[return-value]


async def measure(bench: Bench, *, graphs_off: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"throughput": await bench.throughput()}
    print(json.dumps({k: v for k, v in found["throughput"].items() if k != "metrics"}), flush=True)
    found["faults"] = await bench.faults()
    print(json.dumps(found["faults"]), flush=True)
    if graphs_off:
        found["graphs_off"] = await replace(bench, rounds=1).throughput(graphs=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="sglang", help="a preset of configs/engines")
    parser.add_argument("--count", type=int, default=128, help="trajectories at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graphs-off", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args()
    vocabulary = int(json.loads((given.model / "config.json").read_text())["vocab_size"])
    shape = Round(
        count=given.count, turns=given.turns, prompt=given.prompt, new=given.new,
        vocabulary=vocabulary,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            config=_config(given.engine, given.keys), model=given.model, folder=Path(folder),
            shape=shape, rounds=given.rounds,
        )  # fmt: skip
        found = asyncio.run(measure(bench, graphs_off=given.graphs_off))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], check=False, capture_output=True, text=True
    ).stdout
    result = {
        "benchmark": "engine_recovery",
        "command": f"python -m benchmarks.engine_recovery {' '.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "engine": found["throughput"].pop("engine"), "commit": commit.strip(),
        },
        **found,
    }  # fmt: skip
    metrics = {name: one.pop("metrics", None) for name, one in found.items()}
    text = json.dumps(result, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
        given.out.with_suffix(".metrics.txt").write_text("\n".join(metrics["throughput"] or []))
    print(text)


if __name__ == "__main__":
    main()
