"""A group as the bytes of one Parquet file, and back.

A row is a trajectory; `datasets`, polars and duckdb open it as it is. Pages carry Parquet's own
checksums. These leave page headers and the footer open, so 16 bytes between the last page and the
footer, where Parquet looks at nothing, hold a mark and a CRC-32 of all other bytes of the file.
Arrow writes and reads all but the heavy columns, whose pages `pages` makes (and says why).
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
from agentrl.engine.experts import NO_EXPERTS, Experts
from agentrl.errors import RecordError
from agentrl.handoff.pages import (
    Page,
    decode_bytes,
    decode_lists,
    decode_texts,
    encode_bytes,
    encode_lists,
    encode_texts,
    graft,
)
from agentrl.handoff.trajectory import Group, Trajectory

# Memory that goes back to the kernel after each group comes back as page faults, a quarter of the
# time of writing. So: malloc instead of Arrow's own pool, and malloc shown a block of 16 MB, once,
# untouched, after whose return glibc keeps up to twice as much for the next use.
pa.set_memory_pool(pa.system_memory_pool())
np.empty(16 << 20, np.uint8)


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
        pa.field("experts", pa.binary(), nullable=False),
        pa.field("expert_layers", pa.int32(), nullable=False),
        pa.field("experts_per_token", pa.int32(), nullable=False),
    ]
)
SINCE_EXPERTS = SCHEMA.names[-3:]
"""Files written before these columns lack them, and hold no experts."""
SCALARS = ("run", "draw", "task_id", "attempt", "node", "reward", "cause", "turns", "tries")
TEXTS = ("messages", "patch")
TOKEN_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "loss_mask": np.bool_,
}
SPLIT = "tokens"
"""Half of a token id's bytes are nearly constant: side by side they compress better and faster."""
LEVELS = {"tokens": 1, "logprobs": -1, "loss_mask": 1, "messages": 1, "patch": 1, "experts": -1}
"""Of zstd. Logprobs are zeros, which any level packs, and noise, on which a higher one toils;
experts are noise too."""
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": LEVELS["messages"],
    "use_dictionary": False,
    "column_encoding": {
        f"{SPLIT}.list.element": "BYTE_STREAM_SPLIT",
        "loss_mask.list.element": "PLAIN",
    },
    "data_page_version": "2.0",
    "write_statistics": False,
    "write_page_checksum": True,
    "store_schema": False,
}
GROUP_KEY = b"agentrl.group"
MARK = b"AGENTRL\x02"
TAIL = struct.Struct("<I4s")
"""Parquet's last eight bytes: length of the footer, and its mark."""
SEAL = struct.Struct("<8sII")
"""Our mark, the CRC-32 of what is before it, and of what is after it."""


def encode_group(group: Group) -> list[memoryview]:
    """Return the file as pieces, to be written one after another."""
    facts = {"draw": group.draw, "task_id": group.task_id, "dropped": group.dropped}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, **OPTIONS) as writer:
        writer.write_table(_table(group.trajectories))
        writer.add_key_value_metadata({GROUP_KEY: json.dumps(facts).encode()})
    return _sealed(*_with_pages(memoryview(sink.getvalue()).cast("B"), group.trajectories))


def decode_group(data: bytes, path: Path) -> Group:
    """Read the bytes of the file at `path`. Raises RecordError with the path and the reason."""
    check_seal(data, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_types(file.schema_arrow)
        facts = json.loads((file.metadata.metadata or {})[GROUP_KEY])
        group = Group(
            draw=int(facts["draw"]),
            task_id=str(facts["task_id"]),
            dropped=str(facts["dropped"]),
            trajectories=_trajectories(file, memoryview(data)),
        )
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: not a readable group: {error}") from error
    strays = [one for one in group.trajectories if one.draw != group.draw]
    if strays:
        raise RecordError(
            f"{path}: group of draw {group.draw} holds a row of draw {strays[0].draw}"
        )
    return group


def _with_pages(
    file: memoryview, rows: Sequence[Trajectory]
) -> tuple[list[memoryview], memoryview]:
    """Return what comes before the seal, and the footer, of `file` with its heavy columns full."""
    footer_size, magic = TAIL.unpack(file[-TAIL.size :])
    body, footer = file[: -footer_size - TAIL.size], file[-footer_size - TAIL.size : -TAIL.size]
    if not rows:
        return [body], file[len(body) :]
    pages = {name.encode(): _page(name, rows) for name in LEVELS}
    grafted = graft(len(body), footer, pages)
    pieces = [piece for page in pages.values() for piece in page.pieces]
    return [body, *pieces], memoryview(grafted + TAIL.pack(len(grafted), magic))


def _page(name: str, rows: Sequence[Trajectory]) -> Page:
    values = [getattr(row, name) for row in rows]
    if name == "experts":
        return encode_bytes([_flat(value) for value in values], level=LEVELS[name])
    if name in TEXTS:
        return encode_texts(values, level=LEVELS[name])
    return encode_lists(values, is_split=name == SPLIT, level=LEVELS[name])


def _sealed(before: list[memoryview], footer: memoryview) -> list[memoryview]:
    checksum = 0
    for piece in before:
        checksum = zlib.crc32(piece, checksum)
    return [*before, memoryview(SEAL.pack(MARK, checksum, zlib.crc32(footer))), footer]


def check_seal(data: bytes, path: Path) -> None:
    """Raise RecordError unless `data`, of the file at `path`, is whole, ours, and unchanged."""
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
        for name in SCALARS
    }
    for name in TOKEN_FIELDS:
        columns[name] = pa.array([()] * len(rows), SCHEMA.field(name).type)
    for name in TEXTS:
        columns[name] = pa.array([""] * len(rows), SCHEMA.field(name).type)
    columns["experts"] = pa.array([b""] * len(rows), pa.binary())
    for place, name in enumerate(("expert_layers", "experts_per_token"), 1):
        columns[name] = pa.array([row.experts.shape[place] for row in rows], pa.int32())
    columns["versions"] = _span_array(rows)
    columns["seconds"] = pa.array(
        [list(row.seconds.items()) for row in rows], SCHEMA.field("seconds").type
    )
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


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


def _check_types(found: pa.Schema) -> None:
    types = {item.name: item.type for item in found}
    for item in SCHEMA:
        if item.name not in types:
            if item.name in SINCE_EXPERTS:
                continue
            raise ValueError(f"column {item.name!r} is missing")
        if not _same(types[item.name], item.type):
            raise ValueError(f"column {item.name!r} is {types[item.name]}, must be {item.type}")


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


def _trajectories(file: pq.ParquetFile, data: memoryview) -> tuple[Trajectory, ...]:
    rows = file.metadata.num_rows
    if not rows:
        return ()
    known = set(file.schema_arrow.names)
    names = [name for name in SCHEMA.names if name not in LEVELS and name in known]
    table = file.read(names, use_threads=False).combine_chunks()  # a few small columns
    plain = {name: table.column(name).to_pylist() for name in SCALARS}
    seconds = table.column("seconds").to_pylist()
    pages = _pages(file.metadata.row_group(0), data)
    arrays = {name: decode_lists(pages[name], kind, rows) for name, kind in TOKEN_FIELDS.items()}
    texts = {name: decode_texts(pages[name], rows) for name in TEXTS}
    spans = _spans(table.column("versions").chunk(0))
    experts = _experts(table, pages, [len(row) for row in arrays["tokens"]])
    return tuple(
        Trajectory(
            **{name: values[row] for name, values in plain.items()},
            tokens=arrays["tokens"][row],
            logprobs=arrays["logprobs"][row],
            loss_mask=arrays["loss_mask"][row],
            experts=experts[row],
            versions=spans[row],
            messages=texts["messages"][row],
            patch=texts["patch"][row],
            seconds=dict(seconds[row] or ()),
        )
        for row in range(rows)
    )


def _flat(experts: Experts) -> memoryview:
    little: NDArray[Any] = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _experts(table: pa.Table, pages: dict[str, memoryview], tokens: Sequence[int]) -> list[Experts]:
    """Return each row's [tokens, layers, experts a token]. Raises ValueError, LookupError."""
    if "expert_layers" not in table.column_names:
        return [NO_EXPERTS] * len(tokens)
    sizes = [table.column(name).to_pylist() for name in ("expert_layers", "experts_per_token")]
    rows = decode_bytes(pages["experts"], len(tokens))
    return [_shaped(*facts) for facts in zip(rows, tokens, *sizes, strict=True)]


def _shaped(row: memoryview, tokens: int, layers: int, per_token: int) -> Experts:
    if not row:
        return NO_EXPERTS
    shape, values = (tokens, layers, per_token), tokens * layers * per_token
    kind = {values: "<u1", 2 * values: "<u2"}.get(len(row))
    if kind is None:
        raise ValueError(f"{len(row)} bytes of experts for {list(shape)} values")
    return np.frombuffer(row, kind).reshape(shape)


def _spans(column: pa.ListArray) -> list[tuple[VersionSpan, ...]]:
    fields = [column.values.field(place).to_numpy().tolist() for place in range(len(SPAN))]
    spans = [
        VersionSpan(version=version, start=start, end=end)
        for version, start, end in zip(*fields, strict=True)
    ]
    return [tuple(spans[first:last]) for first, last in pairwise(column.offsets.to_pylist())]


def _pages(row_group: pq.RowGroupMetaData, data: memoryview) -> dict[str, memoryview]:
    columns = [row_group.column(place) for place in range(row_group.num_columns)]
    return {
        column.path_in_schema.split(".")[0]: data[column.data_page_offset :] for column in columns
    }
