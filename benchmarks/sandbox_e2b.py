"""Commands in flight at once through the real E2B SDK, against the loopback server.

The server is a process of its own; its commands wait until all have come, or until time is up, so
a pool that is too narrow shows as a number under the one asked for. With `--narrow` the SDK keeps
its own pool (200 an address).

    python -m benchmarks.sandbox_e2b [--count 1000] [--narrow]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.sandbox.base import ExecResult
from agentrl.sandbox.e2b_sdk import open_sdk
from agentrl.sandbox.limits import Limits, secure
from agentrl.sandbox.loopback import serve

RESULTS = Path(__file__).parent / "results/sandbox_e2b.json"
WAIT_S = 120.0


class Waiting:
    """A sandbox whose commands end together: when `count` are there, or time is up."""

    def __init__(self, provider: WaitingProvider) -> None:
        self._provider = provider

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        max_bytes: int = 10_000,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        self._provider.arrived += 1
        if self._provider.arrived == self._provider.count:
            self._provider.all_here.set()
        try:
            await asyncio.wait_for(self._provider.all_here.wait(), WAIT_S)
        except TimeoutError:
            self._provider.all_here.set()
        return ExecResult(
            output="done\n", exit_code=0, timed_out=False, truncated=False, oom=False, seconds=0
        )

    async def put(self, path: str, data: bytes) -> None:
        return None

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return b""

    async def stop_processes(self) -> None:
        return None

    async def close(self) -> None:
        return None


class WaitingProvider:
    """Starts such sandboxes at once."""

    name = "waiting"

    def __init__(self, count: int) -> None:
        self.count = count
        self.arrived = 0
        self.all_here = asyncio.Event()

    async def start(self, image: Path, *, owner: str) -> Waiting:
        return Waiting(self)

    async def close(self) -> None:
        return None


async def serve_alone(count: int) -> None:
    """Serve until stdin ends; say the address first and the most in flight last."""
    async with serve(WaitingProvider(count), Path(tempfile.gettempdir())) as service:
        print(service.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(service.peak, flush=True)


@asynccontextmanager
async def server(count: int) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["-m", "benchmarks.sandbox_e2b", "--serve", "--count", str(count)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(count: int, *, is_narrow: bool) -> dict[str, object]:
    os.environ.setdefault("E2B_API_KEY", "e2b_" + 40 * "0")
    sdk = open_sdk(200 if is_narrow else 2 * count)
    async with server(count) as process:
        assert process.stdout
        assert process.stdin
        url = (await process.stdout.readline()).decode().strip()
        options = {"api_url": url, "sandbox_url": url}
        gate = asyncio.Semaphore(50)

        async def create() -> Any:
            async with gate:
                return await sdk.AsyncSandbox.create("any", timeout=3600, **options)

        sandboxes = await asyncio.gather(*(create() for _ in range(count)))
        begin = time.perf_counter()
        done = await asyncio.gather(
            *(one.commands.run("x", timeout=600, request_timeout=600) for one in sandboxes)
        )
        wall_s = time.perf_counter() - begin
        process.stdin.close()
        peak = int(await process.stdout.readline())
    assert all(one.stdout == "done\n" for one in done)
    return {
        "commands": count,
        "most_in_flight": peak,
        "pool": int(os.environ.get("E2B_MAX_CONNECTIONS", "200")),
        "wall_s": round(wall_s, 2),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--narrow", action="store_true", help="leave the SDK's pool as it is")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    secure(Limits.derive(2 * given.count))
    if given.serve:
        asyncio.run(serve_alone(given.count))
        return 0
    found = asyncio.run(measure(given.count, is_narrow=given.narrow))
    print(json.dumps(found, indent=2))
    if not given.narrow:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["most_in_flight"] == given.count else 1


if __name__ == "__main__":
    sys.exit(main())
