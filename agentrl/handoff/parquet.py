"""A group as the bytes of one Parquet file, and back.

A row is a trajectory; `datasets`, polars and duckdb open it as it is. Pages carry Parquet's own
checksums. These leave page headers and the footer open, so 16 bytes between the last page and the
footer, where Parquet looks at nothing, hold a mark and a CRC-32 of all other bytes of the file.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from agentrl.engine.base import VersionSpan
from agentrl.errors import RecordError
from agentrl.handoff.trajectory import Group, Trajectory

# Arrow's own pool returns a group's memory to the kernel after every use, and the page faults of
# getting it back cost a quarter of the writing time; malloc keeps it.
pa.set_memory_pool(pa.system_memory_pool())


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SPAN = pa.struct(
    [pa.field(name, pa.int32(), nullable=False) for name in ("version", "start", "end")]
)
SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("draw", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("node", pa.int32(), nullable=False),
        pa.field("tokens", _list_of(pa.int32()), nullable=False),
        pa.field("logprobs", _list_of(pa.float32()), nullable=False),
        pa.field("loss_mask", _list_of(pa.bool_()), nullable=False),
        pa.field("versions", _list_of(SPAN), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("cause", pa.string(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("tries", pa.int32(), nullable=False),
        pa.field("seconds", pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("patch", pa.string(), nullable=False),
    ]
)
SCALARS = ("run", "draw", "task_id", "attempt", "node", "reward", "cause", "turns", "tries")
TEXTS = ("messages", "patch")
ENCODINGS = {"tokens.list.element": "BYTE_STREAM_SPLIT"}
"""Half of a token id's bytes are nearly constant: side by side they compress better and faster."""
GROUP_KEY = b"agentrl.group"
MARK = b"AGENTRL\x01"
TAIL = struct.Struct("<I4s")
"""Parquet's last eight bytes: length of the footer, and its mark."""
SEAL = struct.Struct("<8sII")
"""Our mark, the CRC-32 of what is before it, and of what is after it."""


def encode_group(group: Group) -> list[memoryview]:
    """Return the file as pieces, to be written one after another."""
    facts = {"draw": group.draw, "task_id": group.task_id, "dropped": group.dropped}
    table = _table(group.trajectories).replace_schema_metadata(
        {GROUP_KEY: json.dumps(facts).encode()}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,  # building one costs more than all the rest, for wide vocabularies
        column_encoding=ENCODINGS,
        write_statistics=False,
        write_page_checksum=True,
    )
    return _sealed(memoryview(sink.getvalue()))


def decode_group(data: bytes, path: Path) -> Group:
    """Read the bytes of the file at `path`. Raises RecordError with the path and the reason."""
    _check_seal(data, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read()
        facts = json.loads((file.metadata.metadata or {})[GROUP_KEY])
        group = Group(
            draw=int(facts["draw"]),
            task_id=str(facts["task_id"]),
            dropped=str(facts["dropped"]),
            trajectories=_trajectories(_conforming(table)),
        )
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: not a readable group: {error}") from error
    strays = [one for one in group.trajectories if one.draw != group.draw]
    if strays:
        raise RecordError(
            f"{path}: group of draw {group.draw} holds a row of draw {strays[0].draw}"
        )
    return group


def _sealed(file: memoryview) -> list[memoryview]:
    footer_size, _ = TAIL.unpack(file[-TAIL.size :])
    body, footer = file[: -footer_size - TAIL.size], file[-footer_size - TAIL.size :]
    seal = SEAL.pack(MARK, zlib.crc32(body), zlib.crc32(footer))
    return [body, memoryview(seal), footer]


def _check_seal(data: bytes, path: Path) -> None:
    size = len(data)
    if size < TAIL.size or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise RecordError(f"{path}: {size} bytes that are no whole Parquet file; torn, or foreign")
    footer = size - TAIL.size - TAIL.unpack(data[-TAIL.size :])[0]
    if footer < SEAL.size:
        raise RecordError(f"{path}: its footer is longer than the file; torn, or changed since")
    mark, before, after = SEAL.unpack(data[footer - SEAL.size : footer])
    if mark != MARK:
        raise RecordError(f"{path}: a Parquet file that holds no group of this project's; foreign")
    view = memoryview(data)
    if zlib.crc32(view[: footer - SEAL.size]) != before or zlib.crc32(view[footer:]) != after:
        raise RecordError(f"{path}: its checksum does not match; changed since it was written")


def _table(rows: Sequence[Trajectory]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(row, name) for row in rows], SCHEMA.field(name).type)
        for name in (*SCALARS, *TEXTS)
    }
    for name in ("tokens", "logprobs", "loss_mask"):
        columns[name] = _list_array([getattr(row, name) for row in rows], SCHEMA.field(name).type)
    columns["versions"] = _span_array(rows)
    columns["seconds"] = pa.array(
        [list(row.seconds.items()) for row in rows], SCHEMA.field("seconds").type
    )
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _list_array(rows: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.Array:
    values = np.concatenate(rows) if rows else np.empty(0, kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(
        _offsets([len(row) for row in rows]), pa.array(values, kind.value_type), type=kind
    )


def _span_array(rows: Sequence[Trajectory]) -> pa.Array:
    spans = [span for row in rows for span in row.versions]
    values = pa.StructArray.from_arrays(
        [pa.array([getattr(span, item.name) for span in spans], item.type) for item in SPAN],
        fields=list(SPAN),
    )
    return pa.ListArray.from_arrays(
        _offsets([len(row.versions) for row in rows]), values, type=SCHEMA.field("versions").type
    )


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def _conforming(table: pa.Table) -> pa.Table:
    found = {item.name: item.type for item in table.schema}
    for item in SCHEMA:
        if item.name not in found:
            raise ValueError(f"column {item.name!r} is missing")
        if not _same(found[item.name], item.type):
            raise ValueError(f"column {item.name!r} is {found[item.name]}, must be {item.type}")
    return table.combine_chunks()


def _same(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types; names of list items differ between writers and mean nothing."""
    if pa.types.is_map(wanted):
        return bool(pa.types.is_map(found) and found.item_type == wanted.item_type)
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and _same(found.value_type, wanted.value_type))
    if pa.types.is_struct(wanted):
        return bool(
            pa.types.is_struct(found)
            and [(item.name, item.type) for item in found]
            == [(item.name, item.type) for item in wanted]
        )
    return bool(found == wanted)


def _trajectories(table: pa.Table) -> tuple[Trajectory, ...]:
    if not table.num_rows:
        return ()
    plain = {name: table.column(name).to_pylist() for name in (*SCALARS, *TEXTS)}
    seconds = table.column("seconds").to_pylist()
    tokens, logprobs, masks = (_rows(table, name) for name in ("tokens", "logprobs", "loss_mask"))
    spans = table.column("versions").to_pylist()
    return tuple(
        Trajectory(
            **{name: values[row] for name, values in plain.items()},
            tokens=tokens[row],
            logprobs=logprobs[row],
            loss_mask=masks[row],
            versions=tuple(VersionSpan(**span) for span in spans[row]),
            seconds=dict(seconds[row] or ()),
        )
        for row in range(table.num_rows)
    )


def _rows(table: pa.Table, name: str) -> list[NDArray[Any]]:
    column = table.column(name).chunk(0)
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[first:last] for first, last in pairwise(offsets)]
