"""Files that another process reads: written whole or not at all.

The twin of agentrl.handoff.publish: neither folder may import the other's.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def publish(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write under a temporary name in the same folder, fsync, rename, fsync the folder.

    mode: rights from the first moment on, less the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append one line and fsync it; a torn line that a crash left before it is closed off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and not _ends_whole(file.fileno(), file.tell()):
            line = b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def listed(path: Path) -> bool:
    """Whether `path` is there, by listing its folder: network filesystems cache failed look-ups."""
    return path.parent.is_dir() and path.name in os.listdir(path.parent)


def _ends_whole(handle: int, size: int) -> bool:
    return os.pread(handle, 1, size - 1) == b"\n"
