import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.handoff.pages import decode_lists, decode_texts, encode_lists, encode_texts
from agentrl.handoff.parquet import encode_group
from agentrl.handoff.trajectory import Group, Trajectory

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=9)


def joined(page):
    return memoryview(b"".join(page.pieces))


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, kind=st.sampled_from([np.int32, np.float32, np.bool_]), is_split=st.booleans())
def test_any_lists_come_back_from_a_page(sizes, kind, is_split):
    rng = np.random.default_rng(sum(sizes))
    rows = [rng.integers(-(2**31), 2**31, size).astype(kind) for size in sizes]
    page = encode_lists(rows, is_split=is_split and kind is not np.bool_, level=1)
    found = decode_lists(joined(page), kind, len(rows))
    assert [one.tolist() for one in found] == [one.tolist() for one in rows]
    assert all(one.dtype == kind and one.flags.aligned for one in found)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=9))
def test_any_texts_come_back_from_a_page(texts):
    assert decode_texts(joined(encode_texts(texts, level=1)), len(texts)) == texts


def test_a_page_with_other_rows_than_the_file_is_refused():
    page = joined(encode_texts(["a", "b"], level=1))
    with pytest.raises(ValueError, match="2 rows in a file of 3"):
        decode_texts(page, 3)


def group(sizes):
    rng = np.random.default_rng(0)
    rows = [
        Trajectory(
            run="demo",
            draw=1,
            task_id="t",
            attempt=attempt,
            node=0,
            tokens=rng.integers(0, 150_000, size),
            logprobs=rng.normal(size=size),
            loss_mask=rng.integers(0, 2, size),
            reward=None,
            cause="infra",
            turns=1,
            messages="ü" * size,
            patch="diff" * attempt,
        )
        for attempt, size in enumerate(sizes)
    ]
    return Group(draw=1, task_id="t", trajectories=tuple(rows))


@settings(max_examples=30, deadline=None)
@given(sizes=sizes)
def test_arrow_reads_what_was_written_and_finds_its_checksums_right(sizes):
    made = group(sizes)
    data = pa.BufferReader(b"".join(encode_group(made)))
    table = pq.ParquetFile(data, page_checksum_verification=True).read()
    for name in ("tokens", "logprobs", "loss_mask"):
        wanted = [getattr(row, name).tolist() for row in made.trajectories]
        assert table.column(name).to_pylist() == wanted
    assert table.column("messages").to_pylist() == [row.messages for row in made.trajectories]
    assert table.column("patch").to_pylist() == [row.patch for row in made.trajectories]


@pytest.mark.parametrize("name", ["tokens", "logprobs", "loss_mask", "messages", "patch"])
def test_arrow_finds_a_changed_byte_in_each_heavy_column(name):
    pieces = encode_group(group([500, 400]))
    data = bytearray(b"".join(pieces))
    row_group = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0)
    columns = [row_group.column(place) for place in range(row_group.num_columns)]
    (column,) = (one for one in columns if one.path_in_schema.split(".")[0] == name)
    end = column.data_page_offset + column.total_compressed_size
    data[random.Random(0).randrange(end - 8, end)] ^= 4
    with pytest.raises(OSError, match=r"CRC|checksum"):
        pq.ParquetFile(pa.BufferReader(bytes(data)), page_checksum_verification=True).read()


def test_sizes_in_the_footer_are_those_of_the_pages():
    data = b"".join(encode_group(group([50, 0, 7])))
    row_group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    columns = [row_group.column(place) for place in range(row_group.num_columns)]
    assert row_group.total_byte_size == sum(one.total_uncompressed_size for one in columns)
    assert {one.compression for one in columns} == {"ZSTD"}
