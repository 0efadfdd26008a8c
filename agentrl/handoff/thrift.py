"""Thrift's compact form, as far as Parquet's page headers and footers use it.

A struct is `{field id: (kind, value)}`, a list `(kind of items, items)`; both keep fields that
this project knows nothing of, so that a footer goes through `read_struct` and `write_struct`
unchanged, in the order of field ids. Malformed bytes raise ValueError or IndexError.
"""

from __future__ import annotations

from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
Struct = dict[int, tuple[int, Any]]


def read_struct(data: bytes | memoryview, place: int = 0) -> tuple[Struct, int]:
    """Return the struct at `place`, and the place behind it."""
    found: Struct = {}
    field = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            field += head >> 4
        else:
            number, place = read_varint(data, place)
            field = _unzigzag(number)
        value, place = _read(data, place, head & 15)
        found[field] = head & 15, value
    return found, place + 1


def write_struct(struct: Struct) -> bytes:
    out = bytearray()
    _write(out, STRUCT, struct)
    return bytes(out)


def read_varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[place]) & 128:
        number |= (byte & 127) << shift
        shift += 7
        place += 1
    return number | byte << shift, place + 1


def write_varint(out: bytearray, number: int) -> None:
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def _read(data: bytes | memoryview, place: int, kind: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        number, place = read_varint(data, place)
        return _unzigzag(number), place
    if kind in (TRUE, FALSE):
        return kind == TRUE, place
    if kind == BYTE:
        return data[place], place + 1
    if kind == DOUBLE:
        return bytes(data[place : place + 8]), place + 8
    if kind == BINARY:
        size, place = read_varint(data, place)
        return bytes(data[place : place + size]), place + size
    if kind == LIST:
        return _read_list(data, place)
    if kind == STRUCT:
        return read_struct(data, place)
    raise ValueError(f"a Thrift value of kind {kind}, which Parquet does not use")


def _read_list(data: bytes | memoryview, place: int) -> tuple[tuple[int, list[Any]], int]:
    head = data[place]
    count, kind, place = head >> 4, head & 15, place + 1
    if kind in (TRUE, FALSE):
        raise ValueError("a Thrift list of booleans, which footers do not hold")
    if count == 15:
        count, place = read_varint(data, place)
    items = []
    for _ in range(count):
        item, place = _read(data, place, kind)
        items.append(item)
    return (kind, items), place


def _write(out: bytearray, kind: int, value: Any) -> None:
    if kind in (I16, I32, I64):
        write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
    elif kind == BYTE:
        out.append(value)
    elif kind == DOUBLE:
        out += value
    elif kind == BINARY:
        write_varint(out, len(value))
        out += value
    elif kind == LIST:
        _write_list(out, *value)
    elif kind == STRUCT:
        _write_fields(out, value)


def _write_fields(out: bytearray, struct: Struct) -> None:
    before = 0
    for field, (kind, value) in struct.items():
        if 0 < field - before < 16:
            out.append(field - before << 4 | kind)
        else:
            out.append(kind)
            write_varint(out, field << 1)
        _write(out, kind, value)
        before = field
    out.append(0)


def _write_list(out: bytearray, kind: int, items: list[Any]) -> None:
    if len(items) < 15:
        out.append(len(items) << 4 | kind)
    else:
        out.append(15 << 4 | kind)
        write_varint(out, len(items))
    for item in items:
        _write(out, kind, item)


def _unzigzag(number: int) -> int:
    return number >> 1 ^ -(number & 1)
