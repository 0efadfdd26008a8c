"""Events of one kind as an Arrow table: a column a field, lists and maps as JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

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
    """Return `found`, all of `kind` and from one file, as a table of `schema(kind)`."""
    hints = hints_of(kind)
    columns: list[pa.Array] = []
    for name, arrow in field_types(kind).items():
        values: list[object] = list(map(attrgetter(name), found))
        if _is_nested(hints[name]):
            values = [_encode(value).decode() for value in values]
        columns.append(pa.array(values, arrow))
    columns.append(pa.array(np.full(len(found), file, np.int32)))
    return pa.Table.from_arrays(columns, schema=schema(kind))


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
    column = table.column(name)
    return np.asarray(column.cast(pa.float64()).fill_null(float("nan")).to_numpy(), np.float64)


def texts(table: pa.Table, name: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return a text column as codes [rows] and the texts that they stand for."""
    coded = table.column(name).combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    return coded.indices.to_numpy().astype(np.int64), coded.dictionary.to_pylist()


def _arrow(hint: object) -> pa.DataType:
    if get_origin(hint) in (Union, type(int | None)):
        (hint,) = [each for each in get_args(hint) if each is not type(None)]
    return PLAIN.get(hint, pa.string())  # type: ignore[call-overload]


def _is_nested(hint: object) -> bool:
    return get_origin(hint) in (list, dict)
