"""Frames between a sandbox's owner and its executor.

A frame is a 4-byte big-endian length, then fields, each a 4-byte length and its bytes. Part of the
program that runs inside, so it imports nothing.
"""

from __future__ import annotations


def pack(fields: list[bytes]) -> bytes:
    """Return one frame."""
    body = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes) -> list[bytes]:
    """Return the fields of a frame's body."""
    fields, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        fields.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return fields
