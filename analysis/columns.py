"""Events of one kind as an Arrow table: a column a field, lists and maps as JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl import events
from agentrl.events import Event

E = TypeVar("E", bound=Event)
FILE = "file"
"""Column with the number of the file that a row is from."""
KINDS: dict[str, type[Event]] = {
    str(msgspec.structs.fields(kind) and kind.__struct_config__.tag): kind
    for kind in get_args(events.AnyEvent)
}
NUMPY: dict[pa.DataType, type[np.generic]] = {
    pa.float64(): np.float64,
    pa.int64(): np.int64,
    pa.int32(): np.int32,
    pa.bool_(): np.bool_,
}
ARROW = {numpy: arrow for arrow, numpy in NUMPY.items()}
PLAIN = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
_encode = msgspec.json.Encoder().encode


def tag(kind: type[Event]) -> str:
    """Return the `kind` that stands in an event's JSON."""
    return str(kind.__struct_config__.tag)


@cache
def hints_of(kind: type[Event]) -> dict[str, object]:
    return dict(get_type_hints(kind))


@cache
def field_types(kind: type[Event]) -> dict[str, pa.DataType]:
    """Return each field's Arrow type; text holds JSON where a field is a list or a map."""
    hints = hints_of(kind)
    return {item.name: _arrow(hints[item.name]) for item in msgspec.structs.fields(kind)}


@cache
def schema(kind: type[Event]) -> pa.Schema:
    return pa.schema([*field_types(kind).items(), (FILE, pa.int32())])


def to_table(kind: type[E], found: Sequence[E], file: int) -> pa.Table:
    """Return `found`, all of `kind` and from one file, as a table of `schema(kind)`.

    Raises OverflowError where a whole number needs more than 64 bits.
    """
    hints = hints_of(kind)
    columns: list[pa.Array] = []
    for name, arrow in field_types(kind).items():
        values = map(attrgetter(name), found)
        if arrow == pa.string():
            columns.append(to_texts(map(_json, values) if _is_nested(hints[name]) else values))
        elif type(None) in get_args(hints[name]):
            columns.append(_optional(list(values), NUMPY[arrow]))
        else:
            columns.append(to_arrow(np.fromiter(values, NUMPY[arrow], len(found))))
    columns.append(to_arrow(np.full(len(found), file, np.int32)))
    return pa.Table.from_arrays(columns, schema=schema(kind))


def _json(value: object) -> str:
    return _encode(value).decode()


def to_arrow(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return an array of numbers or of truth values as Arrow's, null where it is missing.

    `pyarrow.array` does the same but imports pandas, where that is installed, for half a second.
    """
    arrow = ARROW[values.dtype.type]
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    buffers = [valid, pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(arrow, len(values), buffers)


def _optional(values: Sequence[float | None], of: type[np.generic]) -> pa.Array:
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    known = np.fromiter((value or 0 for value in values), of, len(values))
    return to_arrow(known, missing)


def to_texts(values: Iterable[str]) -> pa.Array:
    """Return texts as an Arrow column; a file's name may hold what no encoding has."""
    texts = list(values)
    whole = "".join(texts)
    data = whole.encode(errors="replace")
    is_plain = len(data) == len(whole)  # a letter is a byte: lengths are those of the texts
    parts = texts if is_plain else [text.encode(errors="replace") for text in texts]
    ends = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, parts), np.int32, len(texts)), out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def to_events(kind: type[E], table: pa.Table) -> list[E]:
    """Return a table's rows as what they were."""
    hints = hints_of(kind)
    names = list(field_types(kind))
    columns = [table.column(name).to_pylist() for name in names]
    for i, name in enumerate(names):
        if _is_nested(hints[name]):
            decoder = msgspec.json.Decoder(hints[name])
            columns[i] = [decoder.decode(text) for text in columns[i]]
    return [kind(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return one number column; what is null becomes NaN."""
    chunks = [_view(chunk).astype(np.float64) for chunk in table.column(name).chunks if len(chunk)]
    return np.concatenate(chunks) if chunks else np.zeros(0)


def whole_numbers(table: pa.Table, name: str) -> NDArray[np.int64]:
    """Return one column of whole numbers without nulls."""
    chunks = [_view(chunk).astype(np.int64) for chunk in table.column(name).chunks if len(chunk)]
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def texts(table: pa.Table, name: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return a text column as codes [rows] and the texts that they stand for."""
    coded = table.column(name).combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    return _view(coded.indices).astype(np.int64), coded.dictionary.to_pylist()


def _view(array: pa.Array) -> NDArray[Any]:
    """Return an array's values, its nulls as NaN; like `to_numpy`, which imports pandas."""
    if not len(array):
        return np.zeros(0, NUMPY[array.type])
    valid, data = array.buffers()
    here = slice(array.offset, array.offset + len(array))
    is_bits = array.type == pa.bool_()
    values = _bits(data)[here] if is_bits else np.frombuffer(data, NUMPY[array.type])[here]
    return np.where(_bits(valid)[here], values, np.nan) if array.null_count else values


def _bits(buffer: pa.Buffer) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little").astype(np.bool_)


def _arrow(hint: object) -> pa.DataType:
    if get_origin(hint) in (Union, type(int | None)):
        (hint,) = [each for each in get_args(hint) if each is not type(None)]
    return PLAIN.get(hint, pa.string())  # type: ignore[call-overload]


def _is_nested(hint: object) -> bool:
    return get_origin(hint) in (list, dict)
