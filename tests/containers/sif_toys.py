"""Small SIF files: whole in their table of contents, of no use to mount."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from containers import sif


def write_sif(
    path: Path,
    *,
    architecture: bytes = b"02",
    kind: int = sif.PARTITION,
    labels: dict[str, str] | None = None,
) -> Path:
    """Write a SIF of a definition, labels and a file system of no use."""
    found = {"data": {"attributes": {"labels": labels or {"agentrl.gpu": "rocm"}}}}
    texts = [(sif.DEFINITION, b"", b"Bootstrap: x\n", b"")]
    texts += [(sif.JSON_OBJECT, sif.METADATA.encode(), json.dumps(found).encode(), b"")]
    extra = struct.pack("<ii", 1, sif.PRIMARY) + architecture + b"\0"
    texts += [(kind, b"", b"hsqs" * 100, extra)]
    table, data = b"", b""
    begin = sif.HEADER.size + len(texts) * sif.DESCRIPTOR.size
    for number, (what, name, body, more) in enumerate(texts, 1):
        place = (begin + len(data), len(body), len(body), 0, 0, 0, 0)
        table += sif.DESCRIPTOR.pack(what, True, number, 1, 0, *place, name, more)
        data += body
    numbers = (0, 0, 0, len(texts), sif.HEADER.size, len(table), begin, len(data))
    head = sif.HEADER.pack(b"#!", sif.MAGIC, b"01", architecture, b"", *numbers)
    path.write_bytes(head + table + data)
    return path
