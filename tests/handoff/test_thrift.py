import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.handoff.thrift import (
    BINARY,
    BYTE,
    DOUBLE,
    FALSE,
    I32,
    I64,
    LIST,
    STRUCT,
    TRUE,
    read_struct,
    write_struct,
)

scalars = {
    I32: st.integers(-(2**31), 2**31 - 1),
    I64: st.integers(-(2**63), 2**63 - 1),
    BYTE: st.integers(0, 255),
    DOUBLE: st.binary(min_size=8, max_size=8),
    BINARY: st.binary(max_size=300),
}
fields = st.one_of(
    st.sampled_from([(TRUE, True), (FALSE, False)]),
    *(st.tuples(st.just(kind), values) for kind, values in scalars.items()),
    *(
        st.tuples(st.just(LIST), st.tuples(st.just(kind), st.lists(values, max_size=20)))
        for kind, values in scalars.items()
    ),
)


def ordered(fields):
    return st.dictionaries(st.integers(1, 300), fields, max_size=6).map(
        lambda found: dict(sorted(found.items()))
    )


structs = st.recursive(
    ordered(fields),
    lambda inner: ordered(
        st.one_of(
            fields,
            st.tuples(st.just(STRUCT), inner),
            st.tuples(st.just(LIST), st.tuples(st.just(STRUCT), st.lists(inner, max_size=3))),
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(struct=structs)
def test_any_struct_survives_the_bytes(struct):
    data = write_struct(struct)
    assert read_struct(data + b"rest") == (struct, len(data))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_footer_of_arrow_goes_through_unchanged(version):
    sink = pa.BufferOutputStream()
    table = pa.table(
        {"a": [1, None], "b": [["x"], []], "c": [{"k": 1.5}, None], "d": [True, False]}
    )
    pq.write_table(table, sink, compression="zstd", data_page_version=version)
    data = sink.getvalue().to_pybytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    assert write_struct(read_struct(footer)[0]) == footer


def test_bytes_that_are_no_struct_are_refused():
    with pytest.raises(IndexError):
        read_struct(b"\x15")
    with pytest.raises(ValueError, match="kind 11"):
        read_struct(b"\x1b\x00")
    with pytest.raises(ValueError, match="list of booleans"):
        read_struct(b"\x19\x11\x01\x00")
