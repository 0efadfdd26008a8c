"""Proves caps by holding the real number of each thing at once for a moment, then letting go.

`python -m agentrl.caps_proof KIND NUMBER` holds one kind in a process of its own, whose death frees
all; it prints how many it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import RunConfig

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How many of one thing were held at once."""

    what: str
    wanted: int
    held: int
    seconds: float
    error: str = ""

    @property
    def is_enough(self) -> bool:
        return self.held >= self.wanted


def prove(config: RunConfig) -> list[Held]:
    """Hold what the config's trajectories at once need of this machine, a kind after the other."""
    from agentrl.caps import wanted
    from agentrl.sandbox.limits import FILES_PER_SANDBOX, RESERVED_FILES, processes_of

    number, one = wanted(config), config.rollout.concurrency
    return [
        hold("files", RESERVED_FILES + (FILES_PER_SANDBOX + 1) * one),
        hold("processes", processes_of(config.sandbox.kind) * number),
        hold("connections", number),
        asyncio.run(hold_sandboxes(config, number)),
    ]


def hold(kind: str, number: int) -> Held:
    """Hold `number` of `files`, `processes` or `connections` in a process of its own."""
    argv = [sys.executable, "-P", "-m", "agentrl.caps_proof", kind, str(number)]
    began = time.monotonic()
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, start_new_session=True
    )
    seconds = time.monotonic() - began
    if done.returncode:
        return Held(what=kind, wanted=number, held=0, seconds=seconds, error=done.stderr[-300:])
    held, error = json.loads(done.stdout)
    return Held(what=kind, wanted=number, held=held, seconds=seconds, error=error)


async def hold_sandboxes(config: RunConfig, number: int) -> Held:
    """Hold `number` sandboxes over an empty repository, each of which has run a command."""
    from agentrl.errors import InfraError
    from agentrl.sandbox.provider import open_provider

    began, held, error = time.monotonic(), 0, ""
    with tempfile.TemporaryDirectory(prefix="caps-") as name:
        image = Path(name, "image")
        (image / "testbed").mkdir(parents=True)
        try:
            provider = open_provider(
                config.sandbox, run="caps", leases=Path(name, "leases"), concurrency=number
            )
        except InfraError as refused:
            return Held(what="sandboxes", wanted=number, held=0, seconds=0.0, error=str(refused))
        starts = [provider.start(image, owner=f"caps {place}") for place in range(number)]
        found = await asyncio.gather(*starts, return_exceptions=True)
        for sandbox in found:
            if isinstance(sandbox, BaseException):
                error = str(sandbox)
                continue
            try:
                held += (await sandbox.exec("true", timeout_s=60)).exit_code == 0
            except InfraError as lost:
                error = str(lost)
        await provider.close()
    seconds = time.monotonic() - began
    return Held(what="sandboxes", wanted=number, held=held, seconds=seconds, error=error)


def _files(number: int) -> tuple[int, str]:
    return _count(number, lambda: os.open(os.devnull, os.O_RDONLY))


def _connections(number: int) -> tuple[int, str]:
    """Both ends are this process's, so it needs two files for each."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def connect() -> None:
            kept.append(socket.create_connection(server.getsockname(), timeout=10))
            kept.append(server.accept()[0])

        return _count(number, connect)


def _processes(number: int) -> tuple[int, str]:
    read, write = os.pipe()
    children: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)  # until the parent lets go
            os._exit(0)
        children.append(pid)

    found = _count(number, fork)
    os.close(write)
    for pid in children:
        os.waitpid(pid, 0)
    return found


def _count(number: int, take: Callable[[], object]) -> tuple[int, str]:
    for held in range(number):
        try:
            take()
        except OSError as error:
            return held, str(error)
    return number, ""


KINDS = {"files": _files, "processes": _processes, "connections": _connections}


def main(argv: list[str]) -> None:
    kind, number = argv
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError):  # an unlimited hard limit may be no soft one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(KINDS[kind](int(number))))


if __name__ == "__main__":
    main(sys.argv[1:])
