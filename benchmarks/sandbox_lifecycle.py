"""Whole lives of sandboxes, many at once: start, set-up, 8 commands, tests, close.

For each number, all of that many are alive at once before the first goes on. Told are their starts
(p50, p99; the wait for admission apart), trajectories an hour, the share of time by phase in the
form of the report's figure, and what is left afterwards, which has to be nothing. Small numbers go
round several times, so that every line is of at least LEAST_LIVES. Beside it, where a daemon
answers: `docker run -d` of a root with nothing but `sleep`, as many at a time as ours.

    python -m benchmarks.sandbox_lifecycle [--kind bubblewrap] [--environment E] [--at-once 16 64]
        [--warm 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from agentrl.config import SandboxConfig
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.provider import open_provider
from benchmarks.docker_run import docker_starts

RESULTS = Path(__file__).parent / "results/sandbox_lifecycle.json"
PHASES = ("queued", "start", "setup", "command", "grade", "close")
COMMANDS = (
    "ls -la",
    "cat pkg/mod.py",
    "grep -rn x .",
    "sed -i 's/1/2/' pkg/mod.py",
    "python3 -c 'import pkg.mod'",
    "echo note > notes.txt",
    "cat notes.txt pkg/mod.py",
    "git status --short 2>&1 | head -5",
)
TESTS = "python3 -c 'import pkg.mod; assert pkg.mod.x == 2; print(\"test_x PASSED\")'"
LEAST_LIVES = 64
COMMAND_TIMEOUT_S = 300.0


class Life:
    """Times one trajectory's sandbox by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def ends(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now

    def skips(self) -> None:
        """Begin the next phase now: what was waited for is of none."""
        self._since = time.perf_counter()


class Many:
    """`count` slots over one provider; the first life of each waits until all are alive."""

    def __init__(self, provider: SandboxProvider, admission: Admission, image: Path, count: int):
        self.provider = provider
        self.admission = admission
        self.image = image
        self.all_alive = asyncio.Barrier(count)

    async def slot(self, number: int, rounds: int) -> list[Life]:
        return [await self.live(f"{number}/{turn}/0", is_first=turn == 0) for turn in range(rounds)]

    async def live(self, name: str, *, is_first: bool) -> Life:
        life = Life()
        async with self.admission.turn():
            life.ends("queued")
            sandbox = await self.provider.start(self.image, owner=name)
        life.ends("start")
        try:
            if is_first:
                await self.all_alive.wait()
                life.skips()
            await sandbox.exec("touch pkg/__init__.py", timeout_s=COMMAND_TIMEOUT_S)
            life.ends("setup")
            for command in COMMANDS:
                await sandbox.exec(command, timeout_s=COMMAND_TIMEOUT_S)
            life.ends("command")
            await sandbox.stop_processes()
            done = await sandbox.exec(TESTS, timeout_s=COMMAND_TIMEOUT_S)
            assert done.output == "test_x PASSED\n", done
            life.ends("grade")
        finally:
            await sandbox.close()
        life.ends("close")
        return life


async def lives(config: SandboxConfig, image: Path, leases: Path, count: int) -> dict[str, Any]:
    """Live with `count` at once; return what it took and what it left."""
    before = set(psutil.pids())
    admission = Admission.of(config)
    provider = open_provider(
        config, run="benchmark", leases=leases, concurrency=count, admission=admission
    )
    many = Many(provider, admission, image, count)
    rounds = -(-LEAST_LIVES // count)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        slots = [group.create_task(many.slot(number, rounds)) for number in range(count)]
    wall_s = time.perf_counter() - begin
    await provider.close()
    found = [life.seconds for slot in slots for life in slot.result()]
    total = sum(sum(one.values()) for one in found)
    return {
        "alive_at_once": count,
        "lives": len(found),
        "wall_s": round(wall_s, 1),
        "trajectories_an_hour": round(3600 * len(found) / wall_s),
        "start_ms": percentiles([one["start"] for one in found]),
        "queued_s_p50": round(statistics.median(one["queued"] for one in found), 3),
        "share": {name: round(sum(one[name] for one in found) / total, 3) for name in PHASES},
        "left": {
            "leases": len(list(leases.glob("*.json"))),
            "scratch": len(os.listdir(config.scratch)),
            "processes": len(left_over(before, leases.parent)),
        },
    }


def left_over(before: set[int], folder: Path) -> list[str]:
    """Return the command lines of processes that are new and of `folder`, or of FUSE."""
    words = (str(folder), "squashfuse", "fuse-overlayfs")
    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.info["pid"] not in before
        and any(word in " ".join(process.info["cmdline"] or []) for word in words)
    ]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(1000 * statistics.median(ordered), 1),
        "p99": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 1),
    }


def measure(config: SandboxConfig, at_once: Sequence[int], docker: int) -> dict[str, Any]:
    """Measure each number in turn, then Docker's starts."""
    folder = Path(tempfile.mkdtemp())
    runs: list[dict[str, Any]] = []
    try:
        (folder / "scratch").mkdir()
        config = replace(config, scratch=str(folder / "scratch"))
        (folder / "image/testbed/pkg").mkdir(parents=True)
        (folder / "image/testbed/pkg/mod.py").write_text("x = 1\n")
        for count in at_once:
            runs.append(asyncio.run(lives(config, folder / "image", folder / "leases", count)))
            print(json.dumps(runs[-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    seconds, why = docker_starts(docker, config.max_starts) if docker else ([], "not asked for")
    theirs = percentiles(seconds) if seconds else {}
    return {
        "kind": config.kind,
        "starts_at_a_time": config.max_starts,
        "warm": config.warm,
        "runs": runs,
        "docker_run_ms": theirs | {"n": len(seconds)} if seconds else why,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="bubblewrap")
    parser.add_argument("--environment", default="")
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64, 128, 384])
    parser.add_argument("--max-starts", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--warm", type=int, default=0, help="sandbox.warm")
    parser.add_argument("--docker", type=int, default=32, help="containers to start; 0: none")
    given = parser.parse_args(argv)
    config = SandboxConfig(
        kind=given.kind,
        environment=given.environment,
        shell="sh",
        max_starts=given.max_starts,
        warm=given.warm,
        start_timeout_s=300.0,
    )
    found = measure(config, given.at_once, given.docker)
    if isinstance(theirs := found["docker_run_ms"], dict):
        found["times_faster_at_p50"] = {
            str(run["alive_at_once"]): round(theirs["p50"] / run["start_ms"]["p50"], 1)
            for run in found["runs"]
        }
    print(json.dumps({name: value for name, value in found.items() if name != "runs"}, indent=2))
    name = f"sandbox_lifecycle_{given.kind}{'_warm' * bool(given.warm)}"
    RESULTS.with_stem(name).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(not any(run["left"].values()) for run in found["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
