"""What workers and trainer say to each other by socket, and where the trainer is to be found.

A worker sends two frames: a `Parcel` as JSON, and the bytes of the Parquet file. The trainer
answers each with one: an `Answer` as JSON.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import HandoffError, RecordError

MAX_BYTES = 1 << 30
"""Of one group. 16 trajectories of 128k tokens with their texts take a twentieth of it, and nearly
all with the experts of Qwen3-30B-A3B, 384 bytes a token."""
HEARTBEAT_MS = 10_000
LOST_MS = 30_000
"""Without a sign of life, after which a connection counts as lost."""
MALFORMED, WRONG_RUN, TOO_LARGE, TORN = "malformed", "wrong_run", "too_large", "torn"


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Whose group the bytes behind it are."""

    run: str
    attempt: int
    node: int
    draw: int

    def __post_init__(self) -> None:
        if self.node < 0 or self.draw < 0:
            raise ValueError(f"node={self.node}, draw={self.draw}: both count from 0")


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The group of `draw` is durable with the trainer, or was refused for good."""

    draw: int
    refused: str = ""
    detail: str = ""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer process, as endpoints/trainer-0.json tells it."""

    run: str
    attempt: int
    url: str
    id: str
    """Another one for each process: a restarted trainer is told from the one before."""
    pid: int
    host: str


def endpoint_file(attempt_dir: Path) -> Path:
    return attempt_dir / "endpoints" / "trainer-0.json"


def find_endpoint(attempt_dir: Path, *, run: str, attempt: int) -> Endpoint | None:
    """Return the trainer that is there now, found by listing; None for none, or another one's.

    Raises HandoffError for a file that is no endpoint.
    """
    path = endpoint_file(attempt_dir)
    try:
        if path.name not in os.listdir(path.parent):
            return None
        found = decode(path.read_bytes(), Endpoint)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None  # not made yet, or gone or replaced since it was listed
    except RecordError as error:
        raise HandoffError(f"{path}: {error}; the trainer writes this file") from error
    return found if (found.run, found.attempt) == (run, attempt) else None


M_ = TypeVar("M_", bound=msgspec.Struct)


def decode(data: bytes, kind: type[M_]) -> M_:
    """Read one message of that kind. Raises RecordError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise RecordError(f"not a {kind.__name__}: {error}") from error


def open_parcel(frames: Sequence[bytes]) -> tuple[Parcel, bytes]:
    """Return both frames of a worker's message. Raises RecordError."""
    if len(frames) != 2:
        raise RecordError(f"a message of {len(frames)} frames, must be 2")
    return decode(frames[0], Parcel), frames[1]
