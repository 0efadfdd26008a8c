"""One connection that proves who answers: a challenge both ways, under a key that a job shares.

The asker connects from its own chosen address, so that address is proved too. Each side answers
the other's nonce with an HMAC over the round, both names, both nonces and its side; no message
can be sent back as its own answer. The stream is not encrypted and carries nothing afterwards.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

LINE_BYTES = 4096


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    asker: str
    meant: str
    """The node that the asker believes to be at this address."""
    nonce: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    nonce: str
    seen: str
    """The address from which the answerer saw the asker come."""
    mac: str


class Close(msgspec.Struct, frozen=True, kw_only=True):
    mac: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """This node in one round of proofs."""

    node: str
    round: str
    key: bytes

    def mac(self, side: str, asker: str, answerer: str, *nonces: str) -> str:
        text = msgspec.json.encode((self.round, side, asker, answerer, *nonces))
        return hmac.new(self.key, text, "sha256").hexdigest()


@asynccontextmanager
async def listening(party: Party, address: str, *, limit_s: float = 10.0) -> AsyncIterator[int]:
    """Answer challenges at `address` while the block runs; yields the port the kernel gave."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(answer(party, reader, writer), limit_s)
        except (OSError, TimeoutError, EOFError, ValueError, msgspec.MsgspecError):
            pass  # the asker's side reports it; a stranger's connection is not worth a word
        finally:
            writer.close()

    server = await asyncio.start_server(serve, address, 0, limit=LINE_BYTES)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def answer(party: Party, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    hello = msgspec.json.decode(await reader.readline(), type=Hello)
    nonce = secrets.token_hex(16)
    nonces = (hello.nonce, nonce)
    seen = writer.get_extra_info("peername")[0]
    mac = party.mac("answer " + seen, hello.asker, party.node, *nonces)
    await _send(writer, Answer(node=party.node, nonce=nonce, seen=seen, mac=mac))
    close = msgspec.json.decode(await reader.readline(), type=Close)
    wanted = party.mac("close", hello.asker, party.node, *nonces)
    if hmac.compare_digest(close.mac, wanted):
        await _send(writer, Close(mac=party.mac("done", hello.asker, party.node, *nonces)))


async def ask(party: Party, meant: str, at: tuple[str, int], *, source: str, limit_s: float) -> str:
    """Return why `meant` is not proved to be at `at`, as seen from `source`; "" if it is."""
    where = f"{party.node} ({source}) asked {meant} at {at[0]} port {at[1]}"
    try:
        reason = await asyncio.wait_for(_ask(party, meant, at, source), limit_s)
    except TimeoutError:
        reason = f"no answer within {limit_s:g} s; a firewall, or no route"
    except (EOFError, msgspec.MsgspecError, ValueError) as error:
        reason = f"it answered in no such protocol ({error or type(error).__name__})"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{where}: {reason}" if reason else ""


async def _ask(party: Party, meant: str, at: tuple[str, int], source: str) -> str:
    reader, writer = await asyncio.open_connection(*at, local_addr=(source, 0), limit=LINE_BYTES)
    try:
        hello = Hello(asker=party.node, meant=meant, nonce=secrets.token_hex(16))
        await _send(writer, hello)
        got = msgspec.json.decode(await reader.readline(), type=Answer)
        nonces = (hello.nonce, got.nonce)
        wanted = party.mac("answer " + got.seen, party.node, got.node, *nonces)
        if not hmac.compare_digest(got.mac, wanted):
            return f"answered by one without this job's key, which calls itself {got.node!r}"
        if got.node != meant:
            return f"{got.node} answered in its place"
        if got.seen != source:
            return f"it saw {got.seen} come, not {source}: the address is translated on the way"
        await _send(writer, Close(mac=party.mac("close", party.node, got.node, *nonces)))
        done = msgspec.json.decode(await reader.readline(), type=Close)
        is_done = hmac.compare_digest(done.mac, party.mac("done", party.node, got.node, *nonces))
        return "" if is_done else "it did not confirm"
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")
    await writer.drain()
