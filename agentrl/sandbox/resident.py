"""A sandbox as its owner holds it: one socket to the executor inside, requests in turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxLost, SandboxStartError, SandboxUnavailable
from agentrl.sandbox.base import TESTBED, ExecResult
from agentrl.sandbox.frames import pack, unpack

log = logging.getLogger(__name__)
MARGIN_S = 15.0
"""Beyond a command's own timeout, until a silent sandbox counts as lost."""
FILE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
MAX_FRAME = 1 << 30
PARTS = ("frames", "confine", "executor")
LOADER = """\
import os, marshal, sys
def take(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
for name, code in marshal.loads(take(int.from_bytes(take(4), "big"))):
    module = sys.modules["agentrl.sandbox." + name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(sys.argv[1:])
"""
"""Runs the executor, compiled once by the same Python, from its stdin: no file, no compiling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    """What a back end wants run on the host for one sandbox."""

    argv: list[str]
    env: dict[str, str]
    testbed: str = TESTBED
    """What relative paths, and paths in TESTBED, mean to the executor."""


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


class ResidentSandbox:
    """Implements Sandbox over any program that speaks the executor's frames.

    A cancelled request leaves the conversation torn, so it ends the sandbox.
    """

    def __init__(self, spawn: Spawn, process: subprocess.Popen[bytes], near: socket.socket) -> None:
        self.how = ""
        """How the testbed is laid: `overlay` or `copy`."""
        self._spawn = spawn
        self._process = process
        self._near = near
        self._turn = asyncio.Lock()
        self._lost = ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closing: asyncio.Task[None] | None = None
        self._released: Callable[[], Awaitable[None]] | None = None

    @classmethod
    def create(cls, spawn: Spawn) -> ResidentSandbox:
        """Start the process (no waiting). Raises SandboxStartError.

        Call it in the thread of the event loop: bwrap's --die-with-parent is per thread.
        """
        near, far = socket.socketpair()
        try:
            process = subprocess.Popen(
                spawn.argv,
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=far.fileno(),
                env=spawn.env,
                start_new_session=True,
            )
        except OSError as error:
            near.close()
            raise SandboxStartError(f"{spawn.argv[0]} did not start: {error}") from error
        finally:
            far.close()
        return cls(spawn, process, near)

    @property
    def pid(self) -> int:
        return self._process.pid

    def on_close(self, released: Callable[[], Awaitable[None]]) -> None:
        """Have `released` called once, when all processes have ended."""
        self._released = released

    async def boot(self, code: bytes) -> None:
        """Send the executor and wait until it is ready. Raises SandboxStartError."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._near)
        try:
            self._writer.write(code)
            first = await self._reader.readexactly(4)
            if first[0]:  # a frame is far smaller than 16 MiB: this is text
                text = first + await self._reader.read(4000)
                raise SandboxStartError(
                    f"{self._spawn.argv[0]}: {text.decode(errors='replace').strip()}"
                )
            fields = unpack(await self._reader.readexactly(int.from_bytes(first, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxStartError(
                f"{self._spawn.argv[0]} ended while the sandbox started"
            ) from error
        self.how = fields[1].decode()

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        max_bytes: int = 10_000,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        """Run `command` by bash in the testbed; see `Sandbox.exec`.

        Background children, even those that hold the output pipe, do not delay the return; they
        live until `stop_processes`, `close` or any command's timeout. `oom` is a judgement: the
        command failed and its output speaks of memory, or it died of a SIGKILL that was not ours.
        """
        if "\0" in command:
            return refused("the command holds a NUL byte, which no shell can run")
        request = [b"exec", command.encode(errors="surrogateescape"), repr(timeout_s).encode()]
        request.append(b"%d" % max_bytes)
        for name, value in (env or {}).items():
            request += [name.encode(), value.encode()]
        reply = await self._ask(request, timeout_s + MARGIN_S)
        if reply[0] != b"exec":
            raise await self._lose(f"the executor answered {reply[0]!r} to a command")
        output, code, timed_out, truncated, oom, seconds = reply[1:]
        return ExecResult(
            output=output.decode(errors="replace"),
            exit_code=int(code),
            timed_out=timed_out == b"1",
            truncated=truncated == b"1",
            oom=oom == b"1",
            seconds=float(seconds),
        )

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.put`. Raises OSError in the sandbox's words, SandboxLost."""
        _check(await self._ask([b"put", self._path(path), data], FILE_TIMEOUT_S), path)

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file; see `Sandbox.get`. Raises FileNotFoundError, OSError, SandboxLost."""
        reply = await self._ask([b"get", self._path(path), b"%d" % max_bytes], FILE_TIMEOUT_S)
        _check(reply, path)
        return reply[1]

    async def stop_processes(self) -> None:
        """End all that commands left running; files stay. Raises SandboxLost."""
        _check(await self._ask([b"stop"], FILE_TIMEOUT_S), "stop_processes")

    async def close(self) -> None:
        """End everything and give back what it held; idempotent, finishes even when cancelled."""
        if self._closing is None:
            self._lost = self._lost or "it was closed"
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def _path(self, path: str) -> bytes:
        inside = os.path.join(TESTBED, path)
        if inside == TESTBED or inside.startswith(TESTBED + "/"):
            inside = self._spawn.testbed + inside[len(TESTBED) :]
        return os.fsencode(inside)

    async def _ask(self, request: list[bytes], deadline_s: float) -> list[bytes]:
        """Send one request and return its reply. Raises SandboxLost, never hangs."""
        async with self._turn:
            if self._lost or self._reader is None or self._writer is None:
                raise SandboxLost(
                    f"sandbox of pid {self.pid} is gone: {self._lost or 'not started'}"
                )
            try:
                async with asyncio.timeout(deadline_s):
                    self._writer.write(pack(request))
                    await self._writer.drain()
                    size = int.from_bytes(await self._reader.readexactly(4), "big")
                    if not 0 < size < MAX_FRAME:
                        raise await self._lose(f"it answered with a frame of {size} bytes")
                    return unpack(await self._reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise await self._lose("its process ended") from error
            except TimeoutError as error:
                raise await self._lose(f"no answer within {deadline_s:.0f} s") from error
            except asyncio.CancelledError:
                self._lost = self._lost or "a request was cancelled half-way"
                self._process.kill()
                raise

    async def _lose(self, why: str) -> SandboxLost:
        self._lost = why
        self._process.kill()
        return SandboxLost(f"sandbox of pid {self.pid} is gone: {why}")

    async def _close(self) -> None:
        if self._writer is None:
            self._near.close()
        else:
            self._writer.close()
        if not await _ended(self._process, CLOSE_TIMEOUT_S):
            log.warning("sandbox of pid %d did not end by itself; killed", self.pid)
            self._process.kill()
            await _ended(self._process, CLOSE_TIMEOUT_S)
        if self._released is not None:
            try:
                await self._released()
            except OSError as error:
                log.warning("sandbox of pid %d: left for `agentrl sweep`: %s", self.pid, error)


def refused(why: str) -> ExecResult:
    """Return the end of a command that no shell was asked to run."""
    return ExecResult(
        output=why, exit_code=126, timed_out=False, truncated=False, oom=False, seconds=0.0
    )


def _check(reply: list[bytes], path: str) -> None:
    if reply[0] == b"missing":
        raise FileNotFoundError(f"{path}: {reply[1].decode(errors='replace')}")
    if reply[0] == b"error":
        raise OSError(f"{path}: {reply[1].decode(errors='replace')}")


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a process's end without a thread, reap it, and say whether it came."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)
    try:
        over = asyncio.Event()
        loop.add_reader(descriptor, over.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), timeout_s)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.poll() is not None
