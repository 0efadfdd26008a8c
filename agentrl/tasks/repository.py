"""Writes a git repository of one commit, in Python: git itself would take 20 ms and more for each.

The commit is the buggy state, alone: no earlier commit, reflog or loose object shows the fix.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path

_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
_AUTHOR = "repair <repair@localhost> 1700000000 +0000"
_FOLDERS = ("objects/info", "objects/pack", "refs/heads", "refs/tags")


def write_repository(folder: Path, files: Mapping[str, str]) -> None:
    """Make `folder`, holding `files` (no sub-folders) and a `.git` that has just committed them."""
    if any("/" in name or name.startswith(".") for name in files):
        raise ValueError(f"{sorted(files)}: must be plain names at the root of the repository")
    git = folder / ".git"
    for name in _FOLDERS:
        (git / name).mkdir(parents=True, exist_ok=True)
    entries: list[tuple[bytes, bytes, int]] = []
    for name in sorted(files):
        data = files[name].encode()
        (folder / name).write_bytes(data)
        entries.append((name.encode(), _write_object(git, "blob", data), len(data)))
    tree = _write_object(git, "tree", b"".join(b"100644 %s\0%s" % entry[:2] for entry in entries))
    text = f"tree {tree.hex()}\nauthor {_AUTHOR}\ncommitter {_AUTHOR}\n\nInitial commit\n"
    commit = _write_object(git, "commit", text.encode())
    (git / "refs/heads/main").write_text(f"{commit.hex()}\n")
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(_CONFIG)
    (git / "index").write_bytes(_index(entries))


def materialise(image: Path, files: Mapping[str, str]) -> Path:
    """Make the image folder of a task unless it is there; safe under several processes at once."""
    if image.is_dir():
        return image
    image.parent.mkdir(parents=True, exist_ok=True)
    temporary = image.parent / f".{image.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        write_repository(temporary / "testbed", files)
        temporary.rename(image)
    except OSError:
        if not image.is_dir():  # else another process was first, with the same files
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return image


def _write_object(git: Path, kind: str, data: bytes) -> bytes:
    whole = b"%s %d\0%s" % (kind.encode(), len(data), data)
    digest = hashlib.sha1(whole, usedforsecurity=False)
    name = digest.hexdigest()
    path = git / "objects" / name[:2] / name[2:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(whole, 1))
    return digest.digest()


def _index(entries: list[tuple[bytes, bytes, int]]) -> bytes:
    """Return an index, version 2, whose zero times make git compare contents on first use."""
    parts = [struct.pack(">4sLL", b"DIRC", 2, len(entries))]
    for name, digest, size in entries:
        stat = struct.pack(">10L", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, size)
        entry = stat + digest + struct.pack(">H", len(name)) + name
        parts.append(entry + b"\0" * (8 - len(entry) % 8))
    body = b"".join(parts)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()
