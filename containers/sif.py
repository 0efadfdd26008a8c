"""Read a SIF image without Apptainer: whether it is whole, for which machine, and its labels.

Layout: github.com/apptainer/sif, pkg/sif (header and descriptors, version 01, little-endian).
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from agentrl.errors import ImageError

HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
MAGIC = b"SIF_MAGIC\0"
PARTITION, LABELS, DEFINITION = 0x4004, 0x4003, 0x4001
JSON_OBJECT, PRIMARY = 0x4006, 2
METADATA = "inspect-metadata.json"
ARCHITECTURES = {"01": "386", "02": "x86_64", "03": "arm", "04": "aarch64", "06": "ppc64le"}
"""SIF's number of an architecture → what `uname -m` says."""
TEXTS = (LABELS, DEFINITION, JSON_OBJECT)
MOST_DESCRIPTORS = 4096
MOST_TEXT = 1 << 24
"""Bytes; what says that it is larger is no text."""
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


class _Attributes(msgspec.Struct):
    labels: dict[str, Any] | None = None


class _Data(msgspec.Struct):
    attributes: _Attributes = msgspec.field(default_factory=_Attributes)


class _Inspection(msgspec.Struct):
    """What Apptainer itself recorded of the image, as far as it is used here."""

    data: _Data = msgspec.field(default_factory=_Data)


def read(path: Path) -> Sif:
    """Read the head of an image. Raises ImageError for what is no SIF, or not a whole one."""
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except IsADirectoryError as error:
        raise ImageError(
            f"image {path}: a folder; pack it: apptainer build NAME.sif {path}"
        ) from error
    except FileNotFoundError as error:
        raise ImageError(
            f"image {path}: no such file (from {Path.cwd()}); `agentrl image build` makes one"
        ) from error
    except OSError as error:
        raise ImageError(
            f"image {path}: cannot be read: {error.strerror}; is it yours to read, and is its "
            "file system mounted here?"
        ) from error


def _read(path: Path, file: BinaryIO) -> Sif:
    fields = _header(path, file.read(HEADER.size))
    size = os.fstat(file.fileno()).st_size
    file.seek(fields[9])
    parts = _parts(path, file.read(fields[8] * DESCRIPTOR.size))
    _refuse_damaged(path, parts, size)

    def text(kind: int, name: str = "") -> str:
        for part in parts:
            if part.kind == kind and name in part.name:
                file.seek(part.offset)
                return file.read(part.size).rstrip(b"\0").decode(errors="replace")
        return ""

    return Sif(
        path=path,
        size=size,
        architecture=_architecture(parts, bytes(fields[3])),
        created=int(fields[5]),
        labels=_labels(path, text(JSON_OBJECT, METADATA), text(LABELS)),
        definition=text(DEFINITION),
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


def _header(path: Path, head: bytes) -> tuple[Any, ...]:
    if len(head) < HEADER.size or head[32:42] != MAGIC:
        what = "empty" if not head else f"begins with {head[:12]!r}"
        raise ImageError(f"image {path}: not a SIF ({what}); was the copy or download whole?")
    found = HEADER.unpack(head)
    if not 1 <= found[8] <= MOST_DESCRIPTORS or found[9] < HEADER.size:
        raise ImageError(
            f"image {path}: a SIF with {found[8]} descriptors at {found[9]}; it is damaged: copy "
            "or build it again"
        )
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


def _refuse_damaged(path: Path, parts: list[_Part], size: int) -> None:
    end = max((part.offset + part.size for part in parts), default=0)
    if end > size:
        raise ImageError(
            f"image {path}: truncated: {size} bytes of {end}; copy or build it again (a full "
            "disk or quota is the usual cause)"
        )
    for part in parts:
        if min(part.offset, part.size) < 0 or (part.kind in TEXTS and part.size > MOST_TEXT):
            raise ImageError(
                f"image {path}: a part of {part.size} bytes at {part.offset}; it is damaged: copy "
                "or build it again"
            )
    if not any(_is_primary(part) for part in parts):
        raise ImageError(f"image {path}: a SIF without a file system to run; build it again")


def _is_primary(part: _Part) -> bool:
    return part.kind == PARTITION and struct.unpack_from("<ii", part.extra)[1] == PRIMARY


def _architecture(parts: list[_Part], overall: bytes) -> str:
    """Return the primary partition's, which counts when Apptainer mounts it."""
    codes = [part.extra[8:11] for part in parts if _is_primary(part)]
    code = (codes[0] if codes and codes[0].strip(b"\0") else overall).rstrip(b"\0")
    text = code.decode(errors="replace")
    return ARCHITECTURES.get(text, f"unknown ({text})")


def _labels(path: Path, inspection: str, plain: str) -> dict[str, str]:
    """Return the labels: of Apptainer's own record, else of a file of names and values."""
    found: dict[str, Any] = {}
    try:
        if inspection:
            found = msgspec.json.decode(inspection, type=_Inspection).data.attributes.labels or {}
        elif plain:
            found = msgspec.json.decode(plain, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImageError(
            f"image {path}: its labels are not readable ({error}); it is damaged: build it again"
        ) from error
    return {name: str(value) for name, value in found.items()}
