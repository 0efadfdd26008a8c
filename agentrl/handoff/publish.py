"""The one way in which a file that another process reads comes to be.

Temporary name in the same folder → fsync → rename → fsync of the folder: a reader that
lists the folder sees the whole file or none, across SIGKILL and power loss. Temporary
names begin with a dot and end in `.tmp`; no reader takes them.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from io import FileIO
from pathlib import Path


def publish_bytes(path: Path, data: bytes | memoryview) -> None:
    """Put `data` at `path`, replacing what was there. Makes the folder; raises OSError."""
    publish_pieces(path, [memoryview(data)])


def publish_json(path: Path, obj: object) -> None:
    """Put `obj` at `path` as indented JSON; NaN is refused, since most readers refuse it."""
    publish_bytes(path, (json.dumps(obj, indent=1, allow_nan=False) + "\n").encode())


def publish_pieces(path: Path, pieces: Iterable[memoryview]) -> None:
    """Put `pieces`, one after another, at `path`.

    When the disk fails nothing changes at `path`, and the temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        with temporary.open("xb", buffering=0) as file:
            for piece in pieces:
                _write_all(file, piece)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make renames and deletions inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file: FileIO, rest: memoryview) -> None:
    while len(rest):  # an unbuffered write may be short, as on a full disk just before ENOSPC
        rest = rest[file.write(rest) :]
