"""A sandbox's executor as a child process of its owner, over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import subprocess
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.watch import end_commands

log = logging.getLogger(__name__)
PARTS = ("frames", "bounded", "confine", "executor")
LAST_WORDS_S = 1.0
"""After a process's end, until who may still speak for it inside hears the end of its stdin: a
request on its way then would fail, and hide why the process ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    """What a back end wants run on the host for one sandbox."""

    argv: list[str]
    env: dict[str, str]
    places: Mapping[str, str] = field(default_factory=dict)
    """Folder of the sandbox → what the executor takes for it; others are what they say."""
    is_monitored: bool = False
    """`argv` undoes mounts once the executor has ended, so it must not be killed before that."""


@functools.cache
def compile_executor(python: str) -> bytes:
    """Return the executor's parts for LOADER, compiled by `python`, with their length in front."""
    program = (
        "import marshal, sys\n"
        "code = [(p, compile(open(f'{sys.argv[1]}/{p}.py').read(), p, 'exec', optimize=2))"
        " for p in sys.argv[2:]]\n"
        "sys.stdout.buffer.write(marshal.dumps(code))"
    )
    argv = [python, "-I", "-S", "-c", program, str(Path(__file__).parent), *PARTS]
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SandboxUnavailable(f"{python} cannot compile the executor: {done.stderr.decode()}")
    return len(done.stdout).to_bytes(4, "big") + done.stdout


class Child:
    """Implements resident.Host over a process that this one started.

    Its death ends the conversation, whoever inside has outlived it: Apptainer's process, as an
    ordinary user, is only the parent of the one that holds the sandbox.
    """

    def __init__(self, spawn: Spawn) -> None:
        """Start the process (no waiting). Raises SandboxStartError.

        Call it in the thread of the event loop: bwrap's --die-with-parent is per thread.
        """
        self.name = spawn.argv[0]
        self._is_monitored = spawn.is_monitored
        self._is_open = False
        self._over = asyncio.Event()
        self._near, far = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                spawn.argv,
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=far.fileno(),
                env=spawn.env,
                start_new_session=True,
            )
            self._descriptor = self._follow()
        except OSError as error:
            self._near.close()
            raise SandboxStartError(f"{spawn.argv[0]} did not start: {error}") from error
        finally:
            far.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self) -> tuple[StreamReader, StreamWriter]:
        self._is_open = True
        return await asyncio.open_unix_connection(sock=self._near)

    def kill(self) -> None:
        """End the executor, and with it all inside; a monitor has still to undo its mounts."""
        if self._is_monitored and (inner := lease.first_inside(self.pid)):
            lease.kill(inner)
        else:
            self._process.kill()

    def end_commands(self) -> None:
        end_commands(self.pid)

    async def end(self, timeout_s: float) -> bool:
        """Wait for the end without a thread, reap it, and say whether the executor came to it."""
        if not self._is_open:
            self._near.close()
        if await self._ended(timeout_s):
            return self._process.returncode == 0
        log.warning("%s of pid %d did not end in %g s: killed", self.name, self.pid, timeout_s)
        for kill in (self.kill, self._process.terminate, self._process.kill):
            kill()
            if await self._ended(timeout_s):
                break
        return False

    async def _ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
        return self._process.poll() is not None

    def _follow(self) -> int:
        """Have `_on_end` called at the process's end; return the descriptor that tells of it."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left
            self._process.kill()
            self._process.wait()
            raise
        asyncio.get_running_loop().add_reader(descriptor, self._on_end)
        return descriptor

    def _on_end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._over.set()
        loop.call_later(LAST_WORDS_S, self._hang_up)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, as it is after most ends
            self._near.shutdown(socket.SHUT_WR)
