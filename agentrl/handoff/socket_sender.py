"""A worker's end of the socket: each group is sent until the trainer says that it is durable.

A new connection, to a restarted trainer or the same one, gets all groups again that nobody has
acknowledged. What is unacknowledged when this process dies is lost, and its draws are issued again,
as all draws are that were under way. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from agentrl.errors import HandoffError, WaitTimeout
from agentrl.events import Drop, Writer
from agentrl.handoff import socket_keys
from agentrl.handoff.parquet import encode_group
from agentrl.handoff.socket_wire import (
    HEARTBEAT_MS,
    LOST_MS,
    MAX_BYTES,
    Answer,
    Endpoint,
    Parcel,
    decode,
    endpoint_file,
    find_endpoint,
)
from agentrl.handoff.trajectory import Group

log = logging.getLogger(__name__)
WINDOW = 4
"""Groups on the wire at once: libzmq's high-water mark on either side."""
HIGH_WATER = 16
"""Groups that wait for the trainer, beyond which a worker starts no more."""
LOOK_S = 0.2
"""Between two looks for a trainer, while there is no connection to one."""


@dataclass(kw_only=True)
class _Waiting:
    """A group that nobody has acknowledged."""

    header: bytes
    body: bytes
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


class _LineLostError(Exception):
    """Ends one connection's tasks; the next connection follows."""


class _OverError(Exception):
    """The trainer has left for good while we are closing."""


@dataclass(kw_only=True)
class SocketSender:
    """Async context manager for one worker; its end waits up to `flush_s` for acknowledgements.

    limit_s: without any acknowledgement while groups wait, after which `write` raises WaitTimeout.
    """

    attempt_dir: Path
    run: str
    attempt: int
    node: int
    events: Writer
    limit_s: float
    flush_s: float
    high_water: int = HIGH_WATER
    max_bytes: int = MAX_BYTES
    connections: int = 0
    """Made so far."""
    _outbox: dict[int, _Waiting] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _progress: float = 0.0
    _trouble: str = ""
    _failure: Exception | None = None
    _is_closing: bool = False

    @property
    def waiting(self) -> list[int]:
        """Draws whose groups nobody has acknowledged."""
        return sorted(self._outbox)

    @property
    def is_full(self) -> bool:
        return len(self._outbox) >= self.high_water

    async def write(self, group: Group) -> None:
        """Return once the trainer has `group` on disk; a cancelled caller's group is still sent.

        Raises HandoffError if it is refused, WaitTimeout if no trainer takes it.
        """
        body = await asyncio.to_thread(_encode, group)
        if len(body) > self.max_bytes:
            raise HandoffError(
                f"draw {group.draw}: its group is {len(body)} bytes, a socket takes "
                f"{self.max_bytes}; lower agent.tokens_per_trajectory, or take handoff=files"
            )
        waiting = self._add(group.draw, body)
        await waiting.settled.wait()
        if waiting.refusal:
            raise HandoffError(f"draw {group.draw}: the trainer refused it: {waiting.refusal}")
        if self._failure is not None:
            raise self._failure

    def _add(self, draw: int, body: bytes) -> _Waiting:
        if self._failure is not None:
            raise self._failure
        parcel = Parcel(run=self.run, attempt=self.attempt, node=self.node, draw=draw)
        waiting = _Waiting(header=msgspec.json.encode(parcel), body=body)
        if not self._outbox:
            self._progress = time.monotonic()
        self._outbox[draw] = waiting
        self._news.set()
        if len(self._outbox) == self.high_water:
            log.warning(
                "%d groups wait for the trainer: no draw starts until it takes some. %s",
                self.high_water,
                self._trouble,
            )
        return waiting

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._talk = asyncio.create_task(self._keep_talking())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._flush()
        finally:
            self._talk.cancel()
            await asyncio.wait({self._talk})
            self._context.destroy(linger=0)
        for draw in self.waiting:
            self.events.write(Drop(what="group", reason="unsent", draw=draw))
        if self._outbox:
            log.warning(
                "node %d: %d groups could not be handed on and are made again: draws %s. %s",
                self.node,
                len(self._outbox),
                ", ".join(map(str, self.waiting)),
                self._trouble,
            )

    async def _flush(self) -> None:
        self._is_closing = True
        if self._outbox and not self._talk.done():
            settled = asyncio.create_task(self._all_settled())
            await asyncio.wait(
                {settled, self._talk},
                timeout=self.flush_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            settled.cancel()

    async def _all_settled(self) -> None:
        for waiting in list(self._outbox.values()):
            await waiting.settled.wait()

    async def _keep_talking(self) -> None:
        """Talk until cancelled; what ends it otherwise is raised by every `write`."""
        try:
            while True:
                await self._talk_once(await self._find())
                self._check_progress()
                await asyncio.sleep(LOOK_S)
        except _OverError:
            self._trouble = "The trainer has ended."
            self._failure = HandoffError(self._trouble)
        except Exception as error:
            self._failure = error
            log.error("no more groups are sent: %s", error)
        for waiting in self._outbox.values():
            waiting.settled.set()

    async def _find(self) -> Endpoint:
        while True:
            found = await self._look()
            if found is not None:
                return found
            self._trouble = f"{endpoint_file(self.attempt_dir)} names no trainer of this attempt."
            self._check_progress()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> Endpoint | None:
        """Return the trainer's endpoint. Raises _OverError if we are closing and it has left."""
        found = await asyncio.to_thread(
            find_endpoint, self.attempt_dir, run=self.run, attempt=self.attempt
        )
        if found is None and self._is_closing:
            raise _OverError
        return found

    def _check_progress(self) -> None:
        if self._outbox and time.monotonic() > self._progress + self.limit_s:
            raise WaitTimeout(
                f"no acknowledgement for {self.limit_s:g} s while {len(self._outbox)} groups of "
                f"node {self.node} wait for the trainer. {self._trouble} Read the trainer's log"
            )

    async def _talk_once(self, endpoint: Endpoint) -> None:
        """Talk over one connection until it is lost or another trainer is there."""
        keys = await asyncio.to_thread(socket_keys.read, self.attempt_dir / socket_keys.FILE)
        self.connections += 1
        line = _Line(self._context, keys, endpoint)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(line))
                tasks.create_task(self._take_answers(line))
                tasks.create_task(line.watch())
                tasks.create_task(self._look_out(line))
        except* _LineLostError as lost:
            self._trouble = f"{lost.exceptions[0]}."
            log.info("node %d: %s", self.node, lost.exceptions[0])
        except* _OverError:
            raise _OverError from None
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            line.close()

    async def _send(self, line: _Line) -> None:
        sent: set[int] = set()
        while True:
            self._news.clear()
            for draw in [draw for draw in self._outbox if draw not in sent]:
                await line.window.acquire()
                waiting = self._outbox[draw]
                await line.socket.send_multipart([waiting.header, waiting.body])
                sent.add(draw)
            await self._news.wait()

    async def _take_answers(self, line: _Line) -> None:
        while True:
            answer = decode(await line.socket.recv(), Answer)
            line.window.release()
            self._progress = time.monotonic()
            waiting = self._outbox.pop(answer.draw, None)
            if waiting is not None:
                waiting.refusal = answer.refused and f"{answer.refused}: {answer.detail}"
                waiting.settled.set()

    async def _look_out(self, line: _Line) -> NoReturn:
        """End the line when another trainer is there, or for good when nobody answers."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._check_progress()
            if not line.is_up:
                found = await self._look()
                if found is None or found.id != line.endpoint.id:
                    raise _LineLostError(f"The trainer at {line.endpoint.url} has gone")


class _Line:
    """One connection to one trainer process."""

    def __init__(
        self, context: zmq.asyncio.Context, keys: socket_keys.Keys, endpoint: Endpoint
    ) -> None:
        self.endpoint = endpoint
        self.is_up = False
        self.window = asyncio.Semaphore(WINDOW)
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = keys.trainer.public.encode()
        self.socket.curve_publickey = keys.worker.public.encode()
        self.socket.curve_secretkey = keys.worker.secret.encode()
        self.socket.sndhwm = self.socket.rcvhwm = WINDOW
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = LOST_MS
        self.socket.ipv6 = "[" in endpoint.url
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(endpoint.url)

    async def watch(self) -> NoReturn:
        """Follow what libzmq tells. Raises _LineLostError: sent groups may be lost with it."""
        while True:
            told = await recv_monitor_message(self._monitor)
            if told["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                raise _LineLostError(
                    f"The trainer at {self.endpoint.url} has gone"
                    if self.is_up
                    else f"The trainer at {self.endpoint.url} refuses this worker's key, or has "
                    "gone while it was asked"
                )
            self.is_up = True

    def close(self) -> None:
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


def _encode(group: Group) -> bytes:
    return b"".join(encode_group(group))
