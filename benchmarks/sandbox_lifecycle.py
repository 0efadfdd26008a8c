"""Whole lives of sandboxes, many at once: start, set-up, 8 commands, tests, close.

For each number at once: starts' p50 and p99 (the wait for admission apart), trajectories an hour,
the share of time by phase in the form of the report's figure, and what is left afterwards, which
has to be nothing. `docker run` is measured beside where a daemon answers, one at a time.

    python -m benchmarks.sandbox_lifecycle [--kind bubblewrap] [--environment E] [--at-once 16 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from agentrl.config import SandboxConfig
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.provider import open_provider

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


class Life:
    """Times one trajectory's sandbox by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def ends(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now


async def live(provider: SandboxProvider, admission: Admission, image: Path, name: str) -> Life:
    life = Life()
    async with admission.turn():
        life.ends("queued")
        sandbox = await provider.start(image, owner=name)
    life.ends("start")
    try:
        await sandbox.exec("touch pkg/__init__.py", timeout_s=120)
        life.ends("setup")
        for command in COMMANDS:
            await sandbox.exec(command, timeout_s=120)
        life.ends("command")
        await sandbox.stop_processes()
        done = await sandbox.exec(TESTS, timeout_s=120)
        assert done.output == "test_x PASSED\n", done
        life.ends("grade")
    finally:
        await sandbox.close()
    life.ends("close")
    return life


async def lives(config: SandboxConfig, image: Path, leases: Path, count: int) -> dict[str, object]:
    """Live `count` at once; return what it took and what it left."""
    before = set(psutil.pids())
    provider = open_provider(
        config, run="benchmark", leases=leases, concurrency=count, is_admitted=True
    )
    admission = Admission.of(config)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        made = [
            group.create_task(live(provider, admission, image, f"{number}/0/0"))
            for number in range(count)
        ]
    wall_s = time.perf_counter() - begin
    await provider.close()
    found = [task.result().seconds for task in made]
    total = sum(sum(one.values()) for one in found)
    starts = sorted(one["start"] for one in found)
    return {
        "at_once": count,
        "trajectories_an_hour": round(3600 * count / wall_s),
        "start_ms": {"p50": ms(statistics.median(starts)), "p99": ms(starts[int(0.99 * count)])},
        "queued_s_p50": round(statistics.median(one["queued"] for one in found), 3),
        "share": {name: round(sum(one[name] for one in found) / total, 3) for name in PHASES},
        "left": {
            "leases": len(list(leases.glob("*.json"))),
            "scratch": len(list(Path(tempfile.gettempdir()).glob("agentrl_lease-*"))),
            "processes": len(left_over(before)),
        },
    }


def left_over(before: set[int]) -> list[str]:
    """Return the command lines of sandboxes' processes that were not there before."""
    words = ("bwrap", "apptainer", "squashfuse", "fuse-overlayfs")
    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.info["pid"] not in before
        and any(word in " ".join(process.info["cmdline"] or []) for word in words)
    ]


def docker_run_ms(reference: str, times: int = 10) -> float | str:
    """Return the median of `docker run --rm REFERENCE true`, or why there is none."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                ["docker", "run", "--rm", "--network", "none", reference, "true"],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            return str(error)
        if done.returncode:
            return done.stderr.strip()[-200:]
        seconds.append(time.perf_counter() - begin)
    return ms(statistics.median(seconds))


def ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="bubblewrap")
    parser.add_argument("--environment", default="")
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64, 128, 384])
    parser.add_argument("--max-starts", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--docker-image", default="", help="measure `docker run` of it beside")
    given = parser.parse_args(argv)
    config = SandboxConfig(
        kind=given.kind,
        environment=given.environment,
        shell="sh",
        max_starts=given.max_starts,
        start_timeout_s=120.0,
    )
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "image/testbed/pkg").mkdir(parents=True)
        (folder / "image/testbed/pkg/mod.py").write_text("x = 1\n")
        runs = []
        for count in given.at_once:
            runs.append(asyncio.run(lives(config, folder / "image", folder / "leases", count)))
            print(json.dumps(runs[-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    found = {
        "kind": given.kind,
        "max_starts": given.max_starts,
        "runs": runs,
        "docker_run_ms": docker_run_ms(given.docker_image) if given.docker_image else None,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }
    RESULTS.with_stem(f"sandbox_lifecycle_{given.kind}").write_text(
        json.dumps(found, indent=2) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
