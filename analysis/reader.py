"""Event files to Arrow tables, in blocks of whole lines: what cannot be read is counted by reason.

A block is decoded in one call; only where that fails is it looked at line by line. As a command it
reads its share of the files for `store`, which runs one such process a core.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from agentrl import events
from agentrl.events import Event
from analysis.columns import KINDS, tag, to_table

BLOCK = 4 << 20
"""Bytes read at a time; a longer line makes its block longer."""
SAMPLE = 8
"""Lines of each block whose field names are compared with those that are known."""
_decoder = msgspec.json.Decoder(events.AnyEvent)
_any = msgspec.json.Decoder()
_BEGIN = re.compile(rb'\{"kind":')
_FIELDS = {name: set(kind.__struct_fields__) | {"kind"} for name, kind in KINDS.items()}


class Share(msgspec.Struct, frozen=True):
    """A range of one file, bytes; both ends are set at line beginnings by the reader."""

    file: int
    path: str
    start: int
    end: int


class Found(msgspec.Struct):
    """What reading came upon beside events."""

    lines: int = 0
    rejected: dict[str, int] = {}
    """Lines that gave no event, by reason."""
    mended: dict[str, int] = {}
    """Lines that gave an event although damaged, by reason."""
    unknown_fields: dict[str, int] = {}
    """`kind.field` → times seen in the sample."""


class Reading:
    """Collects the tables and the counts of any number of shares."""

    def __init__(self) -> None:
        self.lines = 0
        self.rejected: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self._tables: dict[str, list[pa.Table]] = defaultdict(list)

    def add(self, share: Share) -> None:
        """Read one share."""
        for block in blocks(Path(share.path), share.start, share.end):
            self._sample(block)
            self.put(self._decode(block), share.file)

    def put(self, found: list[Event], file: int) -> None:
        """Take events that are decoded already."""
        by_kind: dict[type[Event], list[Event]] = defaultdict(list)
        for event in found:
            by_kind[type(event)].append(event)
        for kind, some in by_kind.items():
            self._tables[tag(kind)].append(to_table(kind, some, file))
        self.lines += len(found)

    def tables(self) -> dict[str, pa.Table]:
        return {kind: pa.concat_tables(parts) for kind, parts in self._tables.items()}

    def found(self) -> Found:
        return Found(
            lines=self.lines + sum(self.rejected.values()),
            rejected=dict(self.rejected),
            mended=dict(self.mended),
            unknown_fields=dict(self.unknown),
        )

    def _decode(self, block: bytes) -> list[Event]:
        if block.endswith(b"\n"):
            try:
                return list(_decoder.decode_lines(block))
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # one line at least is none: find it
        lines = block.splitlines(keepends=True)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> Event | None:
        """Decode one line; count what is wrong with it."""
        bare = line.strip(b"\0 \t\r\n")
        if not bare:
            if b"\0" in line:
                self.rejected["NUL bytes alone"] += 1
            return None
        try:
            event = _decoder.decode(bare)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._damaged(bare, line)
        if not line.endswith(b"\n"):
            self.mended["no line end"] += 1
        elif b"\0" in line:
            self.mended["NUL bytes around an event"] += 1
        return event

    def _damaged(self, bare: bytes, line: bytes) -> Event | None:
        """Take the event that was appended to a torn one, if there is one."""
        reason = _reason(bare, line)
        *_, last = [0, *(match.start() for match in _BEGIN.finditer(bare))]
        if last:
            try:
                event: Event = _decoder.decode(bare[last:])
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.rejected[reason] += 1
                return None
            self.rejected["torn by the next line"] += 1
            return event
        self.rejected[reason] += 1
        return None

    def _sample(self, block: bytes) -> None:
        for line in block.split(b"\n", SAMPLE)[:SAMPLE]:
            for name in _unknown_fields(line):
                self.unknown[name] += 1


def blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the lines that begin in [start, end), some MiB at a time."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            start += len(file.readline()) - 1
        while start < end:
            block = file.read(min(BLOCK, end - start))
            if not block:
                return
            if not block.endswith(b"\n"):
                block += file.readline()
            start += len(block)
            yield block


def write_share(folder: Path, reading: Reading) -> None:
    """Leave what a process read where its parent looks for it."""
    folder.mkdir(parents=True)
    for kind, table in reading.tables().items():
        path = str(folder / f"{kind}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "found.json").write_bytes(msgspec.json.encode(reading.found()))


def read_share(folder: Path, into: dict[str, list[pa.Table]]) -> Found:
    """Add to `into` the tables that `write_share` left."""
    for path in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            into.setdefault(path.stem, []).append(pa.ipc.open_file(source).read_all())
    return msgspec.json.decode((folder / "found.json").read_bytes(), type=Found)


def _reason(bare: bytes, line: bytes) -> str:
    if not line.endswith(b"\n"):
        return "torn last line"
    try:
        whole = _any.decode(bare)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "not JSON"
    kind = whole.get("kind") if isinstance(whole, dict) else None
    if isinstance(kind, str) and kind not in KINDS:
        return f"unknown kind {kind[:40]}"
    return f"{kind[:40]} without what it needs" if isinstance(kind, str) else "not an event"


def _unknown_fields(line: bytes) -> Iterator[str]:
    try:
        whole = _any.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if isinstance(whole, dict) and whole.get("kind") in _FIELDS:
        for name in whole.keys() - _FIELDS[whole["kind"]]:
            yield f"{whole['kind']}.{name}"


def main(argv: list[str]) -> int:
    """Read the shares listed as JSON on the standard input into the folder argv[0]."""
    reading = Reading()
    for share in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Share]):
        reading.add(share)
    write_share(Path(argv[0]), reading)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
