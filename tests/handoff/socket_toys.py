"""Both ends of the socket over one folder, and a client that says whatever it is told to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from agentrl.errors import HandoffError
from agentrl.events import NoEvents
from agentrl.handoff import socket_keys
from agentrl.handoff.parquet import encode_group
from agentrl.handoff.socket_receiver import SocketReceiver
from agentrl.handoff.socket_sender import SocketSender
from agentrl.handoff.socket_wire import Answer, find_endpoint
from agentrl.handoff.spool import list_spool

HEADER = {"run": "demo", "attempt": 1, "node": 0, "draw": 7}


class ListedEvents(NoEvents):
    def __init__(self):
        self.all = []

    def write(self, event):
        self.all.append(event)


def attempt_of(folder, number=1):
    return folder / "attempts" / f"{number:04d}"


def receiver(folder, **changes):
    values = {
        "spool": folder / "spool",
        "attempt_dir": attempt_of(folder),
        "run": "demo",
        "attempt": 1,
        "consumed": (),
        "events": ListedEvents(),
    }
    return SocketReceiver(**(values | changes))


def sender(folder, **changes):
    values = {
        "attempt_dir": attempt_of(folder),
        "run": "demo",
        "attempt": 1,
        "node": 3,
        "events": ListedEvents(),
        "limit_s": 60.0,
        "flush_s": 0.0,
    }
    return SocketSender(**(values | changes))


def send(folder, *groups, **changes):
    """Send `groups` from a worker of its own; return once all are acknowledged."""

    async def run():
        async with sender(folder, **changes) as end:
            await asyncio.gather(*map(end.write, groups))

    asyncio.run(run())


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is of another process or thread
            await asyncio.sleep(0.005)


@contextmanager
def client(folder, *, keys=None):
    """A socket with the attempt's worker key, or with `keys`."""
    keys = keys or socket_keys.read(attempt_of(folder) / socket_keys.FILE)
    endpoint = find_endpoint(attempt_of(folder), run="demo", attempt=1)
    if endpoint is None:
        raise HandoffError("no receiver is open")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = keys.trainer.public.encode()
    socket.curve_publickey = keys.worker.public.encode()
    socket.curve_secretkey = keys.worker.secret.encode()
    socket.rcvtimeo = 60_000
    socket.connect(endpoint.url)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def ask(socket, header, body):
    """Send one message; return the answer."""
    socket.send_multipart([msgspec.json.encode(header), body])
    return msgspec.json.decode(socket.recv(), type=Answer)


def bytes_of(made):
    return b"".join(encode_group(made))


def draws(folder):
    return list(list_spool(folder / "spool"))


@contextmanager
def process(folder, *words):
    """A receiver in a process of its own, which may be killed."""
    script = Path(__file__).with_name("killed_receiver.py")
    running = subprocess.Popen(
        [sys.executable, script, folder, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert running.stdout.readline() == b"open\n"
        yield running
    finally:
        running.send_signal(signal.SIGCONT)
        running.communicate()
