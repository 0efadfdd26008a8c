"""A sandbox as its owner holds it: one socket to the executor inside, requests in turn."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import ParamSpec, Protocol, TypeVar

from agentrl.errors import SandboxLost, SandboxStartError
from agentrl.sandbox.base import TESTBED, ExecResult, Sandbox
from agentrl.sandbox.frames import pack, unpack

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
MARGIN_S = 15.0
"""Beyond a command's own timeout, until a silent sandbox counts as lost."""
FILE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
MAX_FRAME = 1 << 30
TAKE = """\
def take(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
"""
"""Source: reads so many bytes from stdin; its end is the executor's."""
LOADER = f"""\
import os, marshal, sys
{TAKE}for name, code in marshal.loads(take(int.from_bytes(take(4), "big"))):
    module = sys.modules["agentrl.sandbox." + name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(sys.argv[1:])
"""
"""Runs the executor, compiled once by the same Python, from its stdin: no file, no compiling."""


class Host(Protocol):
    """Where a sandbox's executor runs, and how it is reached and ended."""

    name: str
    """The program that starts it, for messages."""

    @property
    def pid(self) -> int:
        """Its process on this machine; 0 when there is none."""

    async def open(self) -> tuple[StreamReader, StreamWriter]:
        """Return the executor's standard output, with error before it is ready, and input."""

    def kill(self) -> None:
        """End it without waiting."""

    def end_commands(self) -> None:
        """End all that runs beside the executor, without asking it. Blocking."""

    async def end(self, timeout_s: float) -> bool:
        """Wait until it has ended, by force after `timeout_s`.

        Returns whether it ended well, so that no process of it can be left.
        """


class ResidentSandbox:
    """Implements Sandbox over any program that speaks the executor's frames.

    A cancelled request leaves the conversation torn, so it ends the sandbox.
    """

    is_system_writable = False
    again: Callable[[], Awaitable[Sandbox]]

    def __init__(self, host: Host, *, code: bytes, places: Mapping[str, str]) -> None:
        """code: the executor, for LOADER. places: folder inside → what the executor calls it."""
        self.how = ""
        """How the testbed is laid: `overlay`, `copy`, or `image` where it was there."""
        self.full = ""
        """Why no command runs any more, where the policy has used up what was its own."""
        self._host = host
        self._code = code
        self._places = places
        self._turn = asyncio.Lock()
        self._lost = ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closing: asyncio.Task[None] | None = None
        self._released: Callable[[bool], Awaitable[None]] | None = None

    @property
    def pid(self) -> int:
        return self._host.pid

    def on_close(self, released: Callable[[bool], Awaitable[None]]) -> None:
        """Have `released` called once, at the end, with whether no process can be left."""
        self._released = released

    def end_commands(self) -> None:
        self._host.end_commands()

    async def boot(self) -> None:
        """Send the executor and wait until it is ready. Raises SandboxStartError."""
        self._reader, self._writer = await self._host.open()
        try:
            self._writer.write(self._code)
            first = await self._reader.readexactly(4)
            if first[0]:  # a frame is far smaller than 16 MiB: this is text
                text = first + await self._reader.read(4000)
                raise SandboxStartError(
                    f"{self._host.name}: {text.decode(errors='replace').strip()}"
                )
            fields = unpack(await self._reader.readexactly(int.from_bytes(first, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxStartError(f"{self._host.name} ended while the sandbox started") from error
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
        if why := unrunnable(command) or self.full:
            return refused(why)
        request = exec_request(command, timeout_s=timeout_s, max_bytes=max_bytes, env=env or {})
        reply = await self._ask(request, timeout_s + MARGIN_S)
        if reply[0] != b"exec":
            raise await self._lose(f"the executor answered {reply[0]!r} to a command")
        done = exec_result(reply)
        if self.full:
            return replace(done, output=f"{done.output}\n[killed: {self.full}]\n", oom=False)
        return done

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.put`. Raises OSError in the sandbox's words, SandboxLost."""
        if self.full:
            raise OSError(errno.ENOSPC, self.full, path)
        check_reply(
            await self._ask([b"put", inside(path, self._places), data], FILE_TIMEOUT_S), path
        )

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file; see `Sandbox.get`. Raises FileNotFoundError, OSError, SandboxLost."""
        reply = await self._ask(
            [b"get", inside(path, self._places), b"%d" % max_bytes], FILE_TIMEOUT_S
        )
        check_reply(reply, path)
        return reply[1]

    async def stop_processes(self) -> None:
        """End all that commands left running; files stay. Raises SandboxLost."""
        check_reply(await self._ask([b"stop"], FILE_TIMEOUT_S), "stop_processes")

    async def close(self) -> None:
        """End everything and give back what it held; idempotent, finishes even when cancelled."""
        if self._closing is None:
            self._lost = self._lost or "it was closed"
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

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
                self._host.kill()
                raise

    async def _lose(self, why: str) -> SandboxLost:
        self._lost = why
        self._host.kill()
        return SandboxLost(f"sandbox of pid {self.pid} is gone: {why}")

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        try:
            ended_well = await self._host.end(CLOSE_TIMEOUT_S)
            if self._released is not None:
                await self._released(ended_well)
        except OSError as error:
            log.warning("sandbox of pid %d: left for `agentrl sweep`: %s", self.pid, error)


def inside(path: str, places: Mapping[str, str]) -> bytes:
    """Return what an executor calls `path`; relative ones are under TESTBED."""
    whole = os.path.join(TESTBED, path)
    for place, real in places.items():
        if whole == place or whole.startswith(place + "/"):
            return os.fsencode(real + whole[len(place) :])
    return os.fsencode(whole)


def unrunnable(command: str) -> str:
    """Return why no shell could be given `command`; empty when one can."""
    return "the command holds a NUL byte, which no shell can run" if "\0" in command else ""


def exec_request(
    command: str, *, timeout_s: float, max_bytes: int, env: Mapping[str, str]
) -> list[bytes]:
    """Return the fields by which an executor is asked to run `command`."""
    pairs = [word.encode() for pair in env.items() for word in pair]
    text = command.encode(errors="surrogateescape")
    return [b"exec", text, repr(timeout_s).encode(), b"%d" % max_bytes, *pairs]


def exec_result(reply: list[bytes]) -> ExecResult:
    """Read an executor's reply to such a request."""
    output, code, timed_out, truncated, oom, seconds = reply[1:]
    return ExecResult(
        output=output.decode(errors="replace"),
        exit_code=int(code),
        timed_out=timed_out == b"1",
        truncated=truncated == b"1",
        oom=oom == b"1",
        seconds=float(seconds),
    )


def refused(why: str) -> ExecResult:
    """Return the end of a command that no shell was asked to run."""
    return ExecResult(
        output=why, exit_code=126, timed_out=False, truncated=False, oom=False, seconds=0.0
    )


def check_reply(reply: list[bytes], path: str) -> None:
    if reply[0] == b"missing":
        raise FileNotFoundError(f"{path}: {reply[1].decode(errors='replace')}")
    if reply[0] == b"error":
        raise OSError(f"{path}: {reply[1].decode(errors='replace')}")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread and, even when cancelled, leave only once it is done."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
