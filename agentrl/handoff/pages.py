"""Heavy columns, lists of numbers and long texts, as one Parquet page each, and back.

Arrow takes 8 ns a value to write a list column and 6 to read it, nearly all of it for levels that
say "one more of the same list" a quarter of a million times. A page made straight from the arrays
says it once a row. Everything else of the file is Arrow's: `graft` points Arrow's footer at these
pages, put behind its own, so that any reader of Parquet reads them like all others.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl.handoff.thrift import (
    FALSE,
    I32,
    STRUCT,
    TRUE,
    Struct,
    read_struct,
    read_varint,
    write_struct,
    write_varint,
)

PLAIN, BYTE_STREAM_SPLIT = 0, 9
DATA_PAGE_V2 = 3
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One column's only page: its header, its levels, and its values, compressed."""

    pieces: tuple[memoryview, memoryview, memoryview]
    entries: int
    """What Parquet counts as values; an empty list is one."""
    plain_size: int
    """Bytes, were it not compressed."""

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def encode_lists(rows: Sequence[NDArray[Any]], *, is_split: bool, level: int) -> Page:
    """Return the page of `rows`; `is_split` puts the first bytes of all values side by side."""
    sizes = [len(row) for row in rows]
    plain = _split(rows) if is_split else _joined(rows)
    return _page(
        plain,
        levels=_levels(sizes),
        entries=sum(size or 1 for size in sizes),
        rows=len(rows),
        empty=sizes.count(0),
        encoding=BYTE_STREAM_SPLIT if is_split else PLAIN,
        level=level,
    )


def encode_texts(rows: Sequence[str], *, level: int) -> Page:
    return encode_bytes([row.encode() for row in rows], level=level)


def encode_bytes(rows: Sequence[bytes | memoryview], *, level: int) -> Page:
    plain = b"".join([part for row in rows for part in (LENGTH.pack(len(row)), row)])
    return _page(
        memoryview(plain),
        levels=(b"", b""),
        entries=len(rows),
        rows=len(rows),
        empty=0,
        encoding=PLAIN,
        level=level,
    )


def decode_lists(data: memoryview, kind: type[np.generic], rows: int) -> list[NDArray[Any]]:
    """Return the arrays of the page at the start of `data`. Raises ValueError, LookupError."""
    shape, levels, plain = _open(data, rows)
    border = shape[6][1]
    sizes = _row_sizes(_read_runs(levels[:border]), _read_runs(levels[border:]))
    if len(sizes) != rows:
        raise ValueError(f"a page of {len(sizes)} lists in a file of {rows} rows")
    values = _unpacked(plain, kind, sum(sizes), shape[4][1])
    return [values[first:last] for first, last in pairwise(np.cumsum([0, *sizes]))]


def decode_texts(data: memoryview, rows: int) -> list[str]:
    """Return the texts of the page at the start of `data`. Raises ValueError, LookupError."""
    return [str(row, "utf-8") for row in decode_bytes(data, rows)]


def decode_bytes(data: memoryview, rows: int) -> list[memoryview]:
    """Return the rows of the page at the start of `data`. Raises ValueError, LookupError."""
    _, _, plain = _open(data, rows)
    found, place = [], 0
    for _ in range(rows):
        (size,) = LENGTH.unpack(plain[place : place + LENGTH.size])
        place += LENGTH.size + size
        if place > len(plain):
            raise ValueError(f"a page of {len(plain)} bytes with a value that ends at {place}")
        found.append(plain[place - size : place])
    return found


def graft(body_size: int, footer: memoryview, pages: Mapping[bytes, Page]) -> bytes:
    """Return `footer` with columns (by top-level name) at `pages`, written at `body_size` on."""
    tree, _ = read_struct(bytes(footer))
    (row_group,) = tree[4][1][1]
    columns = {chunk[3][1][3][1][1][0]: chunk[3][1] for chunk in row_group[1][1][1]}
    for name, page in pages.items():
        column = columns[name]
        _add(row_group, 2, page.plain_size - column[6][1])
        if 6 in row_group:
            _add(row_group, 6, page.size - column[7][1])
        facts = {5: page.entries, 6: page.plain_size, 7: page.size, 9: body_size}
        column.update({field: (column[field][0], value) for field, value in facts.items()})
        body_size += page.size
    return write_struct(tree)


def _add(facts: Struct, field: int, more: int) -> None:
    facts[field] = facts[field][0], facts[field][1] + more


def _page(
    plain: memoryview,
    *,
    levels: tuple[bytes, bytes],
    entries: int,
    rows: int,
    empty: int,
    encoding: int,
    level: int,
) -> Page:
    body = memoryview(pa.Codec("zstd", level).compress(plain)).cast("B") if plain else plain
    repeated, defined = levels
    both = repeated + defined
    shape: Struct = {
        1: (I32, entries),
        2: (I32, empty),
        3: (I32, rows),
        4: (I32, encoding),
        5: (I32, len(defined)),
        6: (I32, len(repeated)),
        7: (TRUE if plain else FALSE, None),
    }
    header = write_struct(
        {
            1: (I32, DATA_PAGE_V2),
            2: (I32, len(both) + len(plain)),
            3: (I32, len(both) + len(body)),
            4: (I32, _signed(zlib.crc32(body, zlib.crc32(both)))),
            8: (STRUCT, shape),
        }
    )
    return Page(
        pieces=(memoryview(header), memoryview(both), body),
        entries=entries,
        plain_size=len(header) + len(both) + len(plain),
    )


def _open(data: memoryview, rows: int) -> tuple[Struct, memoryview, memoryview]:
    """Return facts, levels and values, decompressed, of the page at the start of `data`."""
    header, start = read_struct(data)
    if header[1][1] != DATA_PAGE_V2:
        raise ValueError(f"a page of kind {header[1][1]}, must be {DATA_PAGE_V2}")
    whole = data[start : start + header[3][1]]
    if _signed(zlib.crc32(whole)) != header[4][1]:
        raise ValueError("the checksum of a page does not match")
    shape: Struct = header[8][1]
    if shape[3][1] != rows:
        raise ValueError(f"a page of {shape[3][1]} rows in a file of {rows}")
    border = shape[5][1] + shape[6][1]
    body, plain_size = whole[border:], header[2][1] - border
    if body and shape[7][0] == TRUE:
        body = memoryview(pa.Codec("zstd").decompress(body, plain_size)).cast("B")
    return shape, whole[:border], body


def _levels(sizes: Sequence[int]) -> tuple[bytes, bytes]:
    """Return repetition (0 starts a list) and definition (0 is an empty list) of each entry."""
    repeated = [run for size in sizes for run in ((0, 1), (1, size - 1)) if run[1] > 0]
    return _write_runs(repeated), _write_runs([(1, size) if size else (0, 1) for size in sizes])


def _row_sizes(repeated: list[tuple[int, int]], defined: list[tuple[int, int]]) -> list[int]:
    sizes: list[int] = []
    for level, count in repeated:
        if level:
            sizes[-1] += count
        else:
            sizes += [1] * count
    ends = np.cumsum([count for _, count in defined])
    if sum(sizes) != (ends[-1] if defined else 0):
        raise ValueError("levels of a page do not agree on the number of its entries")
    runs = np.searchsorted(ends, np.cumsum(sizes) - sizes, side="right")
    return [size if defined[run][0] else 0 for size, run in zip(sizes, runs, strict=True)]


def _write_runs(runs: Sequence[tuple[int, int]]) -> bytes:
    out = bytearray()
    for level, count in runs:
        write_varint(out, count << 1)
        out.append(level)
    return bytes(out)


def _read_runs(levels: memoryview) -> list[tuple[int, int]]:
    place = 0
    runs = []
    while place < len(levels):
        head, place = read_varint(levels, place)
        if head & 1:
            raise ValueError("levels of another form than this project writes")
        runs.append((levels[place], head >> 1))
        place += 1
    return runs


def _joined(rows: Sequence[NDArray[Any]]) -> memoryview:
    values = np.concatenate(rows)
    if values.dtype == np.bool_:
        values = np.packbits(values, bitorder="little")
    return _little(values).view(np.uint8).data


def _split(rows: Sequence[NDArray[Any]]) -> memoryview:
    width = rows[0].itemsize
    planes = np.empty((width, sum(len(row) for row in rows)), np.uint8)
    place = 0
    for row in rows:
        planes[:, place : place + len(row)] = _little(row).view(np.uint8).reshape(-1, width).T
        place += len(row)
    return planes.reshape(-1).data


def _little(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def _unpacked(
    data: memoryview, kind: type[np.generic], count: int, encoding: int
) -> NDArray[np.generic]:
    if kind is np.bool_:
        bits = np.frombuffer(data, np.uint8)
        return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
    width = np.dtype(kind).itemsize
    if len(data) != count * width:
        raise ValueError(f"a page of {len(data)} bytes for {count} values of {width}")
    if encoding == BYTE_STREAM_SPLIT:
        joined = np.empty((count, width), np.uint8)
        for place, plane in enumerate(np.frombuffer(data, np.uint8).reshape(width, count)):
            joined[:, place] = plane  # four times as fast as one transposed copy
        return joined.reshape(-1).view(np.dtype(kind).newbyteorder("<"))
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number
