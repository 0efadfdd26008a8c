"""What a request costs the client of engines: CPU, beside aiohttp sending and decoding the same.

    python -m benchmarks.engine_client [--count 128] [--turns 3] [--new 256 512] [--out FILE]

A server process answers every /generate after `--wait` seconds with `--new` fixed tokens and their
log-probabilities. `--count` trajectories run at once, each of `--turns` turns whose prompt holds
all that came before. Rounds alternate: ours, aiohttp's, and trajectories that only sleep, which is
what the measuring itself costs and is part of the other two. The figure is the smallest of each,
for everything that disturbs a round adds to it; the median is beside it. Ratio: aiohttp's CPU over
ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from agentrl.config import EngineConfig
from agentrl.engine.base import Sampling
from agentrl.engine.client import EngineClient
from benchmarks.engine_recovery import header

Turn = Callable[[list[int], str], Awaitable[list[int]]]


def answer_of(new: int) -> bytes:
    """Return what SGLang 0.5.23 would answer."""
    logprobs = [[-1.2345678901234567 - at / 1000, 1000 + at, None] for at in range(new)]
    meta = {
        "id": "0" * 33, "finish_reason": {"type": "length", "length": new}, "prompt_tokens": 512,
        "completion_tokens": new, "cached_tokens": 100, "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": new}],
        "output_token_logprobs": logprobs, "e2e_latency": 1.234,
    }  # fmt: skip
    body = {"text": "", "output_ids": list(range(1000, 1000 + new)), "meta_info": meta}
    return msgspec.json.encode(body)  # without a space, as SGLang's own encoder


def serve(told: Connection, new: int, wait_s: float) -> None:
    body = answer_of(new)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(wait_s)
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def cost(turn: Turn, count: int, turns: int) -> float:
    """Return CPU milliseconds of this process a request."""

    async def trajectory(name: str) -> None:
        ids = list(range(1000, 1512))
        for _ in range(turns):
            ids += await turn(ids, name)

    began = time.process_time()
    await asyncio.gather(*(trajectory(str(at)) for at in range(count)))
    return 1000 * (time.process_time() - began) / (count * turns)


async def measure(url: str, new: int, given: argparse.Namespace) -> dict[str, Any]:
    sampling = Sampling(max_new_tokens=new, temperature=1.0)
    fixed = list(range(1000, 1000 + new))
    config = EngineConfig(context_length=1 << 20)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        EngineClient(lambda: [url], config, weights=lambda: "1-3-abc") as client,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def ours(ids: list[int], name: str) -> list[int]:
            return list((await client.generate(ids, sampling, trajectory=name)).token_ids)

        async def plain(ids: list[int], name: str) -> list[int]:
            asked = {"max_new_tokens": new, "temperature": 1.0}
            body = msgspec.json.encode(
                {"input_ids": ids, "sampling_params": asked, "return_logprob": True, "rid": name}
            )
            kind = {"Content-Type": "application/json"}
            async with session.post(f"{url}/generate", data=body, headers=kind) as response:
                found = msgspec.json.decode(await response.read())
            return [int(one) for one in found["output_ids"]]

        async def none(ids: list[int], name: str) -> list[int]:
            await asyncio.sleep(given.wait)
            return fixed

        turns: dict[str, Turn] = {"ours": ours, "aiohttp": plain, "measuring": none}
        rounds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(given.rounds):
            for name, turn in turns.items():
                rounds[name].append(await cost(turn, given.count, given.turns))
    best = {name: round(min(found), 4) for name, found in rounds.items()}
    return {
        "rounds_ms": {name: [round(one, 4) for one in found] for name, found in rounds.items()},
        "cpu_ms_per_request": best,
        "median_ms": {name: round(statistics.median(found), 4) for name, found in rounds.items()},
        "ratio": round(best["aiohttp"] / best["ours"], 3),
    }


def measure_served(new: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures at `new` tokens a reply, by a server process of its own."""
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(tells, new, given.wait), daemon=True)
    server.start()
    try:
        return asyncio.run(measure(f"http://127.0.0.1:{told.recv()}", new, given))
    finally:
        server.terminate()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=128, help="trajectories at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new", type=int, nargs="+", default=[256, 512], help="tokens a turn")
    parser.add_argument("--wait", type=float, default=0.3, help="seconds that an answer takes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {f"{new}_tokens": measure_served(new, given) for new in given.new}
    text = json.dumps({**header("engine_client"), **found}, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
