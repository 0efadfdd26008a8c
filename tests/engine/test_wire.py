"""Requests over kept connections to a server that says what it is told, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.engine.wire import Wire, parse_head

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@asynccontextmanager
async def peer(act: Peer) -> Any:
    """Serve; `act` is called for each connection. Yields the address and the connections so far."""
    seen: list[asyncio.StreamWriter] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer)
        try:
            await act(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


async def asked(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))


def answers(*pieces: bytes) -> Peer:
    """Answer every request by the pieces, with a moment between them."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await asked(reader)
            except asyncio.IncompleteReadError:
                return
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    return act


def post(act: Peer, times: int = 1) -> tuple[list[tuple[int, bytes]], int]:
    """Return the answers, one after the other, and how many connections they took."""

    async def go() -> tuple[list[tuple[int, bytes]], int]:
        async with peer(act) as (url, seen), Wire(timeout_s=30) as wire:
            return [await wire.post(url, "/generate", b"{}") for _ in range(times)], len(seen)

    return asyncio.run(asyncio.wait_for(go(), 30))


def test_an_answer_is_whole_however_it_is_cut_and_its_connection_is_used_again() -> None:
    pieces = [OK[:3], OK[3:20], OK[20:-2], OK[-2:]]
    assert post(answers(*pieces), times=3) == ([(200, b"hello")] * 3, 1)


def test_other_statuses_and_empty_bodies_are_answers() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    assert post(answers(busy))[0] == [(503, b"")]


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    last = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert post(answers(last), times=2) == ([(200, b"hello")] * 2, 2)


def test_a_kept_connection_that_proves_closed_costs_no_more_than_another() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        await reader.read(1)  # the next request has begun: now it goes

    assert post(once, times=3) == ([(200, b"hello")] * 3, 3)


@pytest.mark.parametrize(
    "said",
    [b"", OK[:-1], b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"x" * 99_999],
)
def test_what_is_no_whole_answer_is_a_connection_error(said: bytes) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(said)

    with pytest.raises(ConnectionError):
        post(act)


def test_an_address_where_nobody_listens_is_named() -> None:
    async def go() -> None:
        async with peer(answers(OK)) as (url, _):
            pass
        async with Wire(timeout_s=30) as wire:
            await wire.post(url, "/generate", b"{}")

    with pytest.raises(ConnectionError, match=r"connecting to http://127.0.0.1:\d+: "):
        asyncio.run(go())


def test_an_answer_that_takes_too_long_is_a_timeout_and_closes_its_connection() -> None:
    async def go() -> None:
        gone = asyncio.Event()

        async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asked(reader)
            writer.write(OK[:-1])
            assert await reader.read() == b""
            gone.set()

        async with peer(act) as (url, _), Wire(timeout_s=0.05) as wire:
            with pytest.raises(TimeoutError):
                await wire.post(url, "/generate", b"{}")
            await asyncio.wait_for(gone.wait(), 30)

    asyncio.run(go())


def test_a_caller_that_gives_up_closes_its_connection_and_no_other() -> None:
    async def go() -> None:
        come, gone = asyncio.Event(), asyncio.Event()

        async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await asked(reader) == b"first":
                come.set()
                assert await reader.read() == b""
                gone.set()
            else:
                writer.write(OK)

        async with peer(act) as (url, _), Wire(timeout_s=30) as wire:
            first = asyncio.create_task(wire.post(url, "/generate", b"first"))
            assert await wire.post(url, "/generate", b"second") == (200, b"hello")
            await asyncio.wait_for(come.wait(), 30)
            first.cancel()
            await asyncio.wait_for(gone.wait(), 30)

    asyncio.run(go())


def test_answers_to_many_at_once_go_to_those_who_asked() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                body = await asked(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def go() -> None:
        async with peer(echo) as (url, seen), Wire(timeout_s=30) as wire:
            for _ in range(3):
                bodies = [str(one).encode() for one in range(200)]
                got = await asyncio.gather(*(wire.post(url, "/", body) for body in bodies))
                assert [body for _, body in got] == bodies
            assert len(seen) <= 200

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"HTTP/1.1 200 OK", "no Content-Length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1", "-1"),
        (b"HTTP/1.1 abc OK\r\ncontent-length: 1", "abc"),
        (b"HTTP/2 200\r\ncontent-length: 1", "no answer of HTTP/1"),
        (b"", "no answer of HTTP/1"),
    ],
)
def test_a_head_that_says_too_little_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_head(text)
