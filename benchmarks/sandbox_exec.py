"""A command in Apptainer: through the resident executor, and by `apptainer exec instance://`.

The same root folder, flags and command; in turn, a round of each after the other, so that both meet
the same load. Wall times; the ratio is of the medians. For an ordinary user run it as that user.

    python -m benchmarks.sandbox_exec ENVIRONMENT [--rounds 5] [--commands 20]

ENVIRONMENT: a SIF made by `apptainer build`, with a Python. Of a root folder that Apptainer did not
make there is no instance; then `apptainer exec` of the folder stands in, which the result says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.sandbox.apptainer import FLAGS, Apptainer, environ, identity
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.provider import open_provider

RESULTS = Path(__file__).parent / "results/sandbox_exec.json"
COMMAND = "echo done"
NAME = f"agentrl-benchmark-{os.getpid()}"


class Instance:
    """An Apptainer instance, or where none can be, `apptainer exec` of the folder each time."""

    def __init__(self, environment: str, folder: Path) -> None:
        self.program = Apptainer(SandboxConfig()).program
        self.env = environ(self.program, folder)
        flags = [flag for flag in FLAGS if flag not in ("--no-init", "--pwd", "/")]
        start = [self.program, "instance", "start", *identity(), *flags, environment, NAME]
        done = subprocess.run(start, env=self.env, capture_output=True, text=True, check=False)
        self.is_instance = done.returncode == 0
        self.why = done.stderr.strip()[-200:]
        where = [f"instance://{NAME}"] if self.is_instance else [*identity(), *FLAGS, environment]
        self.words = [self.program, "exec", *where, "/bin/sh", "-c", COMMAND]

    def seconds(self) -> float:
        begin = time.perf_counter()
        done = subprocess.run(
            self.words, env=self.env, capture_output=True, text=True, check=True, cwd="/"
        )
        assert done.stdout == "done\n"
        return time.perf_counter() - begin

    def close(self) -> None:
        if self.is_instance:
            stop = [self.program, "instance", "stop", NAME]
            subprocess.run(stop, env=self.env, capture_output=True, check=True)


async def resident_seconds(sandbox: Sandbox) -> float:
    begin = time.perf_counter()
    done = await sandbox.exec(COMMAND, timeout_s=60)
    assert done.output == "done\n"
    return time.perf_counter() - begin


async def measure(environment: str, rounds: int, commands: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "image/testbed").mkdir(parents=True)
        config = SandboxConfig(
            kind="apptainer", environment=environment, shell="sh", start_timeout_s=120.0
        )
        provider = open_provider(config, run="benchmark", leases=folder / "l", concurrency=1)
        sandbox = await provider.start(folder / "image", owner="benchmark")
        instance = Instance(environment, folder)
        ours: list[float] = []
        theirs: list[float] = []
        try:
            for _ in range(rounds):
                ours += [await resident_seconds(sandbox) for _ in range(commands)]
                theirs += [instance.seconds() for _ in range(commands)]
        finally:
            instance.close()
            await provider.close()
    return {
        "resident_ms": summary(ours),
        "apptainer_exec_ms": summary(theirs),
        "against": "instance" if instance.is_instance else f"exec of the folder: {instance.why}",
        "times_faster": round(statistics.median(theirs) / statistics.median(ours), 1),
        "uid": os.geteuid(),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(1000 * statistics.median(ordered), 2),
        "p99": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "n": len(ordered),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", type=int, default=20)
    given = parser.parse_args(argv)
    found = asyncio.run(measure(given.environment, given.rounds, given.commands))
    print(json.dumps(found, indent=2))
    if os.access(RESULTS.parent, os.W_OK):
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
