"""What the engine supervisor costs, and how long an engine is away: a real engine, real faults.

    python -m benchmarks.engine_recovery --model FOLDER [--engine sglang] [--out FILE] [KEY=VALUE …]

`windows`: trajectories of several turns, many at once, each followed by the next, through our
client; windows of seconds with every watcher of the supervisor on the engine alternate with windows
with none (in the order A B B A), so that both share whatever the machine does. A reply's tokens
count as made evenly from its request to its answer. Ratio: watched over unwatched of each pair of
neighbours; the median, and the quartiles.
`decode`: one turn of short prompts, on that engine and on one whose graphs are off.
`faults`: half a round's calls in flight, the server is stopped or killed, or its detokenizer
stopped; `noticed_s` is until the engine is taken out, `serving_s` until it answers again having
proved its weights; `lost` counts calls that did not end with all their tokens; `states` are the
supervisor's events.
KEY=VALUE are keys of the engine section, as max_running=128 or sglang.dtype=bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import OmegaConf

from agentrl.config import EngineConfig
from agentrl.config_layers import dotlist, laid_over
from agentrl.engine.admin import EngineAdmin, open_session
from agentrl.engine.base import Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.devices import EngineShare
from agentrl.engine.faults import LogReader
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.engine.restarts import Fault
from agentrl.engine.startup import Start, launch, wait_until_ready
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.engine.watch import Watch, first_fault
from agentrl.events import EngineFault, EngineState, Event, NoEvents
from benchmarks.engine_flow import Flow, Round, Window, compared

POLL_S = 0.01


async def _never() -> Fault:
    never: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()
    return await never


class Told(NoEvents):
    """Keeps what the supervisor says of its engine, and when."""

    def __init__(self) -> None:
        self.states: list[tuple[float, str]] = []

    def write(self, event: Event) -> None:
        at = time.perf_counter()
        if isinstance(event, EngineState) and event.state != "load":
            self.states.append((at, event.state))
        if isinstance(event, EngineFault) and event.cause != "request":
            self.states.append((at, f"ended for {event.cause}"))


@dataclass(frozen=True, kw_only=True)
class Bench:
    config: EngineConfig
    model: Path
    folder: Path
    shape: Round
    windows: int
    window_s: float
    found: dict[str, Any] = field(default_factory=dict)
    """Results by part."""

    async def engine(self, *, graphs: bool = True) -> dict[str, Any]:
        """Measure one engine: with graphs, rounds with and without the watchers; and decoding."""
        async with open_session() as session:
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
                async with EngineClient(lambda: [url], self.config) as client:
                    found = await self._alternate(client, watch) if graphs else {}
                    decode = replace(self.shape, turns=1)
                    await decode.run(client, 900)  # what is compiled at first use
                    found["decode"] = [await decode.run(client, 901 + at) for at in range(2)]
                found["engine"] = weights.able.name
                found["metrics"] = (await admin.metrics()).splitlines()
            finally:
                await process.kill()
        return {"started_s": started, **found}

    async def _alternate(self, client: EngineClient, watch: Watch) -> dict[str, Any]:
        flow = Flow(self.shape, client)
        agents = [asyncio.create_task(flow.agent(at)) for at in range(self.shape.count)]
        windows: list[Window] = []
        try:
            await asyncio.sleep(2 * self.window_s)  # what is compiled at first use
            for number in range(2 * self.windows):
                is_watched = number % 4 in (0, 3)
                windows.append(await self._window(watch, is_watched=is_watched))
            last = windows[-1].end
            await _until(lambda: flow.is_past(last))  # replies that began in the last window
        finally:
            for one in agents:
                one.cancel()
            await asyncio.gather(*agents, return_exceptions=True)
        return {**compared(windows, flow.replies), "longest_stall_s": watch.progress.longest_s}

    async def _window(self, watch: Watch, *, is_watched: bool) -> Window:
        watchers = asyncio.create_task(first_fault(watch.watchers() if is_watched else [_never()]))
        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(self.window_s)
        end, cpu = time.perf_counter(), time.process_time() - cpu
        if watchers.done():
            raise RuntimeError(f"a fault was found: {watchers.result()}")
        watchers.cancel()
        await asyncio.gather(watchers, return_exceptions=True)
        return Window(start=start, end=end, cpu_s=cpu, is_watched=is_watched)

    async def faults(self) -> dict[str, Any]:
        """Stop and kill a supervised engine under load."""
        told = Told()
        supervisor = EngineSupervisor(
            self.config, model=self.model, logs=self.folder / "logs", events=told
        )
        try:
            began = time.perf_counter()
            await supervisor.start(None)
            found: dict[str, Any] = {"start_s": time.perf_counter() - began}
            async with EngineClient(
                supervisor.urls, self.config, weights=supervisor.weights
            ) as client:
                names = ("SIGSTOP", "SIGKILL", "SIGSTOP detokenizer")
                for name in names if self.config.kind == "sglang" else names[:2]:
                    found[name] = await self._fault(supervisor, client, name, told)
                    print(name, json.dumps(found[name]), flush=True)
        finally:
            await supervisor.close()
        return found

    async def _fault(
        self, supervisor: EngineSupervisor, client: EngineClient, name: str, told: Told
    ) -> dict[str, Any]:
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
            "states": {state: round(at - began, 2) for at, state in told.states if at > began},
        }

    def _signal(self, pid: int, name: str) -> None:
        """Send to every process of the engine, or to the one named, but to none above it."""
        family = psutil.Process(pid).children(recursive=True) or [psutil.Process(pid)]
        what, _, whose = name.partition(" ")
        chosen = [one for one in family if whose in " ".join(one.cmdline())]
        if not chosen:
            raise RuntimeError(f"no process of the engine is called {whose}")
        for one in chosen:
            one.send_signal(signal.Signals[what])


async def _until(claim: Callable[[], bool], *, deadline_s: float = 900.0) -> None:
    for _ in range(int(deadline_s / POLL_S)):
        if claim():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"nothing came of a fault within {deadline_s:g} s")


def engine_config(named: str, keys: list[str]) -> EngineConfig:
    below = laid_over(OmegaConf.create(), [f"engine={named}"])
    chosen = OmegaConf.merge(below.get("engine", {}), dotlist(keys))
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EngineConfig), chosen))  # type: ignore[return-value]


async def measure(bench: Bench, parts: list[str], report: Callable[[], None]) -> None:
    """Fill `bench.found` part by part; `report` after each."""
    for part in parts:
        if part == "faults":
            bench.found[part] = await bench.faults()
        else:
            bench.found[part] = await bench.engine(graphs=part == "graphs_on")
        report()
    on, off = (bench.found.get(part, {}).get("decode") for part in ("graphs_on", "graphs_off"))
    if on and off:
        bench.found["decode_tokens_per_s"] = {
            name: max(one["tokens_per_s"] for one in rounds)
            for name, rounds in (("graphs_on", on), ("graphs_off", off))
        }
        report()


PARTS = ("graphs_on", "faults", "graphs_off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="sglang", help="a preset of configs/engines")
    parser.add_argument("--count", type=int, default=128, help="trajectories at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16, help="of each kind, an even number")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--parts", type=one_of(PARTS), default=PARTS, help=",".join(PARTS))
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
            config=engine_config(given.engine, given.keys), model=given.model, folder=Path(folder),
            shape=shape, windows=given.windows, window_s=given.window,
        )  # fmt: skip
        report = functools.partial(_report, bench.found, given.out)
        asyncio.run(measure(bench, given.parts, report))


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads NAME,NAME of an option: spaces would take in the keys after it."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        if odd := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(odd)}: not of {', '.join(known)}")
        return chosen

    return read


def header(name: str) -> dict[str, Any]:
    """Return what a result says of where it comes from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    asked = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(asked, check=False, capture_output=True, text=True).stdout
    return {
        "benchmark": name,
        "command": f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commit": commit.strip(),
        },
    }


def _report(found: dict[str, Any], out: Path | None) -> None:
    """Print what there is so far, and write it: a run may be ended before its last part."""
    shown = {
        part: {key: value for key, value in one.items() if key != "metrics"}
        for part, one in found.items()
    }
    text = json.dumps({**header("engine_recovery"), **shown}, indent=1)
    if out is not None:
        out.write_text(text + "\n")
        metrics = found.get("graphs_on", {}).get("metrics", [])
        out.with_suffix(".metrics.txt").write_text("\n".join(metrics))
    print(text, flush=True)


if __name__ == "__main__":
    main()
