"""Output of a command, bounded while it is read.

Part of the program that runs inside, so it imports nothing.
"""

from __future__ import annotations


class Bounded:
    """The first and last bytes of a stream whose middle is counted, not kept."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.elided = 0

    def add(self, data: bytes) -> None:
        room = self.head_limit - len(self.head)
        self.head += data[:room] if room > 0 else b""
        self.tail += data[max(room, 0) :]
        if len(self.tail) > 2 * self.tail_limit + 65536:
            self.trim()

    def trim(self) -> None:
        over = len(self.tail) - self.tail_limit
        if over > 0:
            self.elided += over
            del self.tail[:over]

    def value(self) -> bytes:
        self.trim()
        if not self.elided:
            return bytes(self.head + self.tail)
        return b"%b\n[... %d bytes elided ...]\n%b" % (
            bytes(self.head),
            self.elided,
            bytes(self.tail),
        )
