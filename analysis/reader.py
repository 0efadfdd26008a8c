"""Event files to Arrow tables, in blocks of whole lines: what cannot be read is counted by reason.

A block is decoded in one call; only where that fails is it looked at line by line.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path

import msgspec
import pyarrow as pa

from agentrl import events
from agentrl.events import Event
from analysis.columns import KINDS, tag, to_table

BLOCK = 1 << 20
"""Bytes read at a time, few enough to stay in a cache; a longer line makes its block longer."""
LINE_END = ord("\n")
SAMPLED = 1 << 16
"""Bytes at a block's begin in which it is sampled."""
SAMPLE = 2
"""Lines of each block whose field names are compared with those that are known."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises on a line that is no event; the last one on thousands of brackets."""
MOST = 2**63 - 1
"""Whole numbers past this fit no column."""
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
        self.rejected: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self._tables: dict[str, list[pa.Table]] = defaultdict(list)

    def add(self, shares: Sequence[Share]) -> None:
        """Read some shares."""
        for share in shares:
            found: list[Event] = []
            try:
                for block in blocks(Path(share.path), share.start, share.end):
                    self._sample(bytes(block[:SAMPLED]))
                    found += self._decode(block)
            except FileNotFoundError:
                self.rejected[events.GONE] += 1
            self.put(found, share.file)

    def put(self, found: Iterable[Event], file: int) -> None:
        """Take events that are decoded already."""
        by_kind: dict[type[Event], list[Event]] = defaultdict(list)
        for event in found:
            by_kind[type(event)].append(event)
        for kind, some in by_kind.items():
            self._tables[tag(kind)].append(self._table(kind, some, file))

    def _table(self, kind: type[Event], some: list[Event], file: int) -> pa.Table:
        try:
            return to_table(kind, some, file)
        except OverflowError:
            fitting = [event for event in some if _fits(event)]
            self.rejected["a number that is too large"] += len(some) - len(fitting)
            return to_table(kind, fitting, file)

    def tables(self) -> dict[str, pa.Table]:
        return {kind: pa.concat_tables(parts) for kind, parts in self._tables.items()}

    def found(self) -> Found:
        return Found(
            lines=sum(map(len, self.tables().values())) + sum(self.rejected.values()),
            rejected=dict(self.rejected),
            mended=dict(self.mended),
            unknown_fields=dict(self.unknown),
        )

    def _decode(self, block: memoryview) -> list[Event]:
        if block[-1] == LINE_END:
            try:
                return list(_decoder.decode_lines(block))
            except UNREADABLE:
                pass  # one line at least is none: find it
        lines = bytes(block).splitlines(keepends=True)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> Event | None:
        """Decode one line; count what is wrong with it."""
        bare = line.strip(b"\0 \t\r\n")
        if not bare:
            if b"\0" in line:
                self.rejected["NUL bytes alone"] += 1
            return None
        try:
            event: Event = _decoder.decode(bare)
        except UNREADABLE:
            return self._damaged(bare, line)
        if not line.endswith(b"\n"):
            self.mended["no line end"] += 1
        elif b"\0" in line:
            self.mended["NUL bytes around an event"] += 1
        return event

    def _damaged(self, bare: bytes, line: bytes) -> Event | None:
        """Take the event that was appended to a torn one, or that has a number that is none."""
        if event := _without_nulls(bare):
            self.mended["numbers that are none (NaN) left out"] += 1
            return event
        *_, last = [0, *(match.start() for match in _BEGIN.finditer(bare))]
        if last and (event := _decoded(bare[last:])):
            self.rejected["torn by the next line"] += 1
            return event
        self.rejected[_reason(bare, line)] += 1
        return None

    def _sample(self, text: bytes) -> None:
        *lines, _ = text.split(b"\n", SAMPLE)
        for line in lines:
            for name in _unknown_fields(line):
                self.unknown[name] += 1


def blocks(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """Yield the lines that begin in [start, end), a block at a time.

    A block is good until the next one is asked for: they share their memory.
    """
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        if start:
            start = _line_after(file, start)
        while start < end:
            file.seek(start)
            got = file.readinto(buffer)
            whole = buffer.rfind(b"\n", 0, got) + 1
            if got == len(buffer) and not whole:
                buffer = bytearray(2 * len(buffer))  # a line that is longer than it
            elif got:
                lines = _until(buffer, whole or got, end - start)
                start += lines
                yield memoryview(buffer)[:lines]
            else:
                return


def _until(buffer: bytearray, whole: int, left: int) -> int:
    """Return the length of the lines in `buffer` that begin before `left`."""
    if whole <= left:
        return whole
    return (buffer.find(b"\n", left - 1, whole) + 1) or whole


def _line_after(file: FileIO, start: int) -> int:
    """Return where the first line begins that begins at `start` or later."""
    file.seek(start - 1)
    at = start - 1
    while piece := file.read(1 << 16):
        if (found := piece.find(b"\n")) >= 0:
            return at + found + 1
        at += len(piece)
    return at


def _decoded(text: bytes) -> Event | None:
    try:
        event: Event = _decoder.decode(text)
    except UNREADABLE:
        return None
    return event


def _without_nulls(text: bytes) -> Event | None:
    """Decode a step whose metrics hold null, as JSON writes NaN, without those metrics."""
    try:
        whole = _any.decode(text)
        metrics = whole["metrics"]
        whole["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        event: Event = msgspec.convert(whole, events.AnyEvent)
    except (*UNREADABLE, LookupError, TypeError, AttributeError):
        return None  # no step, or something else is wrong with it too
    return event if len(metrics) > len(whole["metrics"]) else None


def _fits(event: Event) -> bool:
    """Tell whether each whole number of an event fits a column."""
    values = msgspec.structs.asdict(event).values()
    return all(abs(value) <= MOST for value in values if isinstance(value, int))


def _reason(bare: bytes, line: bytes) -> str:
    if not line.endswith(b"\n"):
        return "torn last line"
    try:
        whole = _any.decode(bare)
    except UNREADABLE:
        return "not JSON"
    kind = whole.get("kind") if isinstance(whole, dict) else None
    if isinstance(kind, str) and kind not in KINDS:
        return f"unknown kind {kind[:40]}"
    return f"{kind[:40]} without what it needs" if isinstance(kind, str) else "not an event"


def _unknown_fields(line: bytes) -> Iterator[str]:
    try:
        whole = _any.decode(line)
    except UNREADABLE:
        return
    if isinstance(whole, dict) and whole.get("kind") in _FIELDS:
        for name in whole.keys() - _FIELDS[whole["kind"]]:
            yield f"{whole['kind']}.{name}"
