"""The trainer's end of the socket: groups go into the spool, and are acknowledged once durable.

All behind the spool (intake, resume, audit, deletion once a checkpoint covers a file) is as with
files. A group comes again when its acknowledgement was lost; it is known by its draw.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import zmq

from agentrl.errors import PublishError, RecordError
from agentrl.events import Drop, Writer
from agentrl.handoff import socket_keys
from agentrl.handoff.parquet import check_seal
from agentrl.handoff.publish import fsync_folder, publish_bytes, publish_json
from agentrl.handoff.socket_door import Door
from agentrl.handoff.socket_wire import (
    MALFORMED,
    MAX_BYTES,
    TOO_LARGE,
    TORN,
    WRONG_RUN,
    Answer,
    Endpoint,
    Parcel,
    endpoint_file,
    open_parcel,
)
from agentrl.handoff.spool import list_files

log = logging.getLogger(__name__)
STOP = "inproc://stop"
REPORT_S = 1.0
"""Between two events that count refusals for one reason: a port scan must not fill the disk."""


@dataclass(kw_only=True)
class SocketReceiver:
    """Context manager; its thread, its socket and its endpoint file end with the block.

    consumed: draws that need no file any more; read while the trainer adds to it.
    """

    spool: Path
    attempt_dir: Path
    run: str
    attempt: int
    consumed: Container[int]
    events: Writer
    address: str = "127.0.0.1"
    """Of the interface to listen on."""
    max_bytes: int = MAX_BYTES
    received: int = 0
    """Groups written since the block began."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason, since the block began."""
    _failure: Exception | None = None
    _kept: set[int] = field(default_factory=set)
    _untold: Counter[str] = field(default_factory=Counter)
    _told_at: float = 0.0

    def __enter__(self) -> Self:
        self._kept = {draw for draw, _ in list_files(self.spool)}
        keys = socket_keys.obtain(self.attempt_dir)
        self._context = zmq.Context()
        try:
            self._stop = self._context.socket(zmq.PAIR)
            self._stop.bind(STOP)
            self._stopped = self._context.socket(zmq.PAIR)
            self._stopped.connect(STOP)
            self._door = Door(self._context, keys, self.address)
            self._publish_endpoint()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="handoff")
        self._thread.start()
        log.info("groups are taken at %s", self._door.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._context.destroy()
        path = endpoint_file(self.attempt_dir)
        path.unlink(missing_ok=True)
        fsync_folder(path.parent)
        self._report(is_last=True)

    def check(self) -> None:
        """Raise what ended the thread, if anything did: PublishError of a full disk, …"""
        if self._failure is not None:
            raise self._failure

    def _publish_endpoint(self) -> None:
        found = Endpoint(
            run=self.run,
            attempt=self.attempt,
            url=self._door.url,
            id=uuid.uuid4().hex,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        publish_json(endpoint_file(self.attempt_dir), msgspec.to_builtins(found))

    def _serve(self) -> None:
        """Run in the thread, and keep what ends it for `check`."""
        try:
            poller = zmq.Poller()
            poller.register(self._stopped, zmq.POLLIN)
            self._door.register(poller)
            while not self._stopped.poll(0):
                poller.poll(int(REPORT_S * 1000) if self._untold else None)
                for reason in self._door.keep():
                    self._count(reason)
                if self._door.socket.poll(0):
                    self._take(self._door.socket.recv_multipart())
                self._report()
        except Exception as error:
            log.exception("no more groups are taken")
            self._failure = error
        finally:
            self._door.close()

    def _take(self, frames: list[bytes]) -> None:
        peer, *message = frames
        try:
            parcel, body = open_parcel(message)
        except RecordError as error:
            self._refuse(MALFORMED, -1, str(error))
            return
        answer = self._judge(parcel, body)
        if answer.refused:
            self._refuse(answer.refused, parcel.draw, answer.detail)
        elif not (parcel.draw in self._kept or parcel.draw in self.consumed):
            self._keep(parcel, body)
        self._door.socket.send_multipart([peer, msgspec.json.encode(answer)])

    def _judge(self, parcel: Parcel, body: bytes) -> Answer:
        if (parcel.run, parcel.attempt) != (self.run, self.attempt):
            detail = (
                f"group of attempt {parcel.attempt} of run {parcel.run!r}, this is attempt "
                f"{self.attempt} of run {self.run!r}"
            )
            return Answer(draw=parcel.draw, refused=WRONG_RUN, detail=detail)
        if len(body) > self.max_bytes:
            detail = f"a group of {len(body)} bytes, at most {self.max_bytes} are taken"
            return Answer(draw=parcel.draw, refused=TOO_LARGE, detail=detail)
        try:
            check_seal(body, self._path_of(parcel))
        except RecordError as error:
            return Answer(draw=parcel.draw, refused=TORN, detail=str(error))
        return Answer(draw=parcel.draw)

    def _keep(self, parcel: Parcel, body: bytes) -> None:
        path = self._path_of(parcel)
        try:
            publish_bytes(path, body)
        except OSError as error:
            raise PublishError(
                f"draw {parcel.draw} came by socket and {path} could not be written: {error}; its "
                "node keeps it and sends it again to the next trainer"
            ) from error
        self._kept.add(parcel.draw)
        self.received += 1

    def _path_of(self, parcel: Parcel) -> Path:
        return self.spool / str(parcel.node) / f"{parcel.draw:08d}.parquet"

    def _refuse(self, reason: str, draw: int, detail: str) -> None:
        self.refused[reason] += 1
        self.events.write(Drop(what="group", reason=reason, draw=draw))
        log.warning("refused draw %d: %s", draw, detail)

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1
        self._untold[reason] += 1

    def _report(self, *, is_last: bool = False) -> None:
        """Write what was refused before anybody could tell whose it was."""
        if not self._untold or (time.monotonic() < self._told_at + REPORT_S and not is_last):
            return
        for reason, count in self._untold.items():
            self.events.write(Drop(what="connection", reason=reason, count=count))
            log.warning("turned away %d connections: %s", count, reason)
        self._untold.clear()
        self._told_at = time.monotonic()
