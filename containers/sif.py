"""Read a SIF image without Apptainer: whether it is whole, for which machine, and its labels.

Layout: github.com/apptainer/sif, pkg/sif (header and descriptors, version 01, little-endian).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ImageError

HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
MAGIC = b"SIF_MAGIC\0"
PARTITION, LABELS, DEFINITION = 0x4004, 0x4003, 0x4001
JSON_OBJECT, PRIMARY = 0x4006, 2
METADATA = "inspect-metadata.json"
ARCHITECTURES = {"01": "386", "02": "x86_64", "03": "arm", "04": "aarch64", "06": "ppc64le"}
"""SIF's number of an architecture → what `uname -m` says."""
MOST_DESCRIPTORS = 4096
BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Sif:
    """One image file, read and found whole."""

    path: Path
    size: int
    architecture: str
    """As `uname -m` says it."""
    created: int
    """Unix time."""
    labels: dict[str, str]
    definition: str
    """Text of the definition file that it was built from; empty where it has none."""

    @property
    def gpu(self) -> str:
        """Which GPUs it was made for, by our own label; `none` where it has none."""
        return self.labels.get("agentrl.gpu", "none")


@dataclass(frozen=True, slots=True)
class _Part:
    kind: int
    offset: int
    size: int
    name: str
    extra: bytes


def read(path: Path) -> Sif:
    """Read the head of an image. Raises ImageError for what is no SIF, or not a whole one."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            fields = _header(path, head)
            file.seek(fields[9])
            table = file.read(min(fields[8], MOST_DESCRIPTORS) * DESCRIPTOR.size)
            parts = _parts(path, table)
            size = os.fstat(file.fileno()).st_size
            _refuse_truncated(path, parts, size)

            def text(kind: int, name: str = "") -> str:
                for part in parts:
                    if part.kind == kind and name in part.name:
                        file.seek(part.offset)
                        return file.read(part.size).rstrip(b"\0").decode(errors="replace")
                return ""

            metadata = text(JSON_OBJECT, METADATA) or text(LABELS)
            definition = text(DEFINITION)
    except IsADirectoryError as error:
        raise ImageError(
            f"image {path}: a folder; pack it: apptainer build NAME.sif {path}"
        ) from error
    except FileNotFoundError as error:
        raise ImageError(
            f"image {path}: no such file (from {Path.cwd()}); `agentrl image build` makes one"
        ) from error
    return Sif(
        path=path,
        size=size,
        architecture=_architecture(parts, fields[3]),
        created=fields[5],
        labels=_labels(path, metadata),
        definition=definition,
    )


def refuse_foreign(image: Sif, machine: str = "") -> None:
    """Raise ImageError if the image is for another kind of machine than `machine`, or this one."""
    machine = machine or platform.machine()
    if image.architecture != machine:
        raise ImageError(
            f"image {image.path}: for {image.architecture}, and this machine is {machine}; "
            "build it on a machine like the nodes"
        )


def digest(path: Path, progress: Callable[[int], None] = lambda done: None) -> str:
    """Return sha256:… of the file. progress: called with the bytes read so far."""
    found = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
            done += len(block)
            progress(done)
    return f"sha256:{found.hexdigest()}"


def _header(path: Path, head: bytes) -> tuple[int, ...]:
    if len(head) < HEADER.size or head[32:42] != MAGIC:
        what = "empty" if not head else f"begins with {head[:12]!r}"
        raise ImageError(f"image {path}: not a SIF ({what}); was the copy or download whole?")
    found = HEADER.unpack(head)
    if found[8] < 1 or found[8] > MOST_DESCRIPTORS:
        raise ImageError(f"image {path}: a SIF with {found[8]} descriptors; it is damaged")
    return found


def _parts(path: Path, table: bytes) -> list[_Part]:
    if len(table) < DESCRIPTOR.size:
        raise ImageError(f"image {path}: ends within its table of contents; copy it again")
    whole = len(table) // DESCRIPTOR.size * DESCRIPTOR.size
    rows = DESCRIPTOR.iter_unpack(table[:whole])
    return [
        _Part(row[0], row[5], row[6], row[12].rstrip(b"\0").decode(errors="replace"), row[13])
        for row in rows
        if row[1]
    ]


def _refuse_truncated(path: Path, parts: list[_Part], size: int) -> None:
    end = max((part.offset + part.size for part in parts), default=0)
    if end > size:
        raise ImageError(
            f"image {path}: truncated: {size} bytes of {end}; copy or build it again (a full "
            "disk or quota is the usual cause)"
        )
    if not any(_is_primary(part) for part in parts):
        raise ImageError(f"image {path}: a SIF without a file system to run; build it again")


def _is_primary(part: _Part) -> bool:
    return part.kind == PARTITION and struct.unpack_from("<ii", part.extra)[1] == PRIMARY


def _architecture(parts: list[_Part], overall: int | bytes) -> str:
    """Return the primary partition's, which counts when Apptainer mounts it."""
    codes = [part.extra[8:11] for part in parts if _is_primary(part)]
    code = (codes[0] if codes and codes[0].strip(b"\0") else bytes(overall)).rstrip(b"\0").decode()
    return ARCHITECTURES.get(code, f"unknown ({code})")


def _labels(path: Path, text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ImageError(f"image {path}: its labels are not JSON: {error}") from error
    if "data" in found:
        found = found["data"].get("attributes", {}).get("labels") or {}
    return {str(name): str(value) for name, value in found.items()}
