import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from socket_toys import receiver, send

from agentrl.engine.base import VersionSpan
from agentrl.errors import RecordError
from agentrl.handoff.parquet import decode_group, encode_group
from agentrl.handoff.spool import SpoolWriter, delete, list_files, list_spool, read_group
from agentrl.handoff.trajectory import Group, Trajectory


def trajectory(draw=42, attempt=0, size=5, **changes):
    values = {
        "run": "demo",
        "draw": draw,
        "task_id": "task'1",
        "attempt": attempt,
        "node": 3,
        "tokens": list(range(size)),
        "logprobs": [-0.5] * size,
        "loss_mask": [place % 2 == 1 for place in range(size)],
        "versions": (VersionSpan(version=7, start=1, end=2),),
        "reward": 1.0,
        "cause": "submitted",
        "turns": 2,
        "seconds": {"model": 0.25, "total": 1.5},
        "messages": '{"messages": []}',
        "patch": "diff --git ü",
    }
    return Trajectory(**(values | changes))


def group(draw=42, attempts=3, **changes):
    rows = tuple(trajectory(draw, attempt, 5 + attempt) for attempt in range(attempts))
    return Group(draw=draw, task_id="task'1", trajectories=rows, **changes)


@pytest.fixture(params=["files", "socket"])
def hand_on(request, odd_path):
    """Brings a group of node 3 into the spool by either transport; returns its file."""
    if request.param == "files":
        yield SpoolWriter(odd_path / "spool", 3).write
        return

    def by_socket(made):
        send(odd_path, made)
        return list_spool(odd_path / "spool")[made.draw]

    with receiver(odd_path):
        yield by_socket


@pytest.fixture
def written(hand_on):
    return hand_on(group())


def test_a_group_comes_back_as_it_was_written(written):
    assert written.parts[-2:] == ("3", "00000042.parquet")
    assert read_group(written) == group()


def test_a_trajectory_without_reward_or_tokens_comes_back(hand_on):
    lost = trajectory(
        tokens=(), logprobs=(), loss_mask=(), versions=(), reward=None, cause="infra", seconds={}
    )
    made = Group(draw=42, task_id="task'1", trajectories=(lost, lost), dropped="0 of 2 graded")
    found = read_group(hand_on(made))
    assert found == made
    assert found.trajectories[0].reward is None


def test_a_group_may_be_empty(hand_on):
    made = Group(draw=1, task_id="t", trajectories=(), dropped="nothing started")
    assert read_group(hand_on(made)) == made


token_rows = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(token_rows, max_size=5), text=st.text(max_size=50), dropped=st.text())
def test_any_group_survives_the_bytes(rows, text, dropped, tmp_path_factory):
    trajectories = tuple(
        trajectory(
            attempt=attempt,
            tokens=row,
            logprobs=np.linspace(-9, 0, len(row)).astype(np.float32),
            loss_mask=[token % 2 == 0 for token in row],
            messages=text.encode("utf-8", "replace").decode(),
            seconds={text.encode("utf-8", "replace").decode(): 0.1},
        )
        for attempt, row in enumerate(rows)
    )
    made = Group(draw=42, task_id="t", trajectories=trajectories, dropped=dropped)
    assert decode_group(b"".join(encode_group(made)), tmp_path_factory.getbasetemp()) == made


def test_other_readers_open_the_file_as_plain_parquet(written):
    table = pq.read_table(written)
    assert table.column("tokens").to_pylist()[0] == [0, 1, 2, 3, 4]
    assert table.schema.field("tokens").type.value_type == pa.int32()
    assert table.schema.field("logprobs").type.value_type == pa.float32()
    assert table.schema.field("loss_mask").type.value_type == pa.bool_()
    assert [item.name for item in table.schema.field("versions").type.value_type] == [
        "version",
        "start",
        "end",
    ]
    column = pq.ParquetFile(written).metadata.row_group(0).column(5)
    assert column.compression == "ZSTD"


def test_every_changed_byte_is_found(written):
    data = bytearray(written.read_bytes())
    for place in random.Random(0).sample(range(len(data)), 300):
        for bit in (1, 128):
            data[place] ^= bit
            with pytest.raises(RecordError, match="00000042"):
                decode_group(bytes(data), written)
            data[place] ^= bit


def test_every_truncation_is_found(written):
    data = written.read_bytes()
    for size in range(0, len(data), 97):
        with pytest.raises(RecordError, match=r"00000042\.parquet"):
            decode_group(data[:size], written)


@pytest.mark.parametrize("junk", [b"", b"hello", b"PAR1" * 50, b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_no_parquet_names_path_and_reason(tmp_path, junk):
    path = tmp_path / "00000001.parquet"
    path.write_bytes(junk)
    with pytest.raises(RecordError, match=r"00000001\.parquet: .*(torn|foreign|footer)"):
        read_group(path)


def test_a_foreign_parquet_file_is_refused(tmp_path):
    path = tmp_path / "00000001.parquet"
    pq.write_table(pa.table({"tokens": [1, 2, 3]}), path)
    with pytest.raises(RecordError, match="foreign"):
        read_group(path)


def test_a_file_under_another_draws_name_is_refused(written):
    other = written.rename(written.with_name("00000043.parquet"))
    with pytest.raises(RecordError, match="named for draw 43, holds draw 42"):
        read_group(other)


def test_rows_of_another_draw_are_refused(hand_on):
    mixed = Group(draw=42, task_id="t", trajectories=(trajectory(41),))
    with pytest.raises(RecordError, match="holds a row of draw 41"):
        read_group(hand_on(mixed))


def test_the_listing_finds_all_nodes_in_the_order_of_draws_and_nothing_else(tmp_path):
    for node, draw in ((1, 9), (0, 123456789), (0, 2)):
        SpoolWriter(tmp_path, node).write(group(draw, 1))
    (tmp_path / "0" / ".00000005.parquet.1-a.tmp").write_bytes(b"torn")
    (tmp_path / "0" / "notes.txt").write_bytes(b"")
    assert list(list_spool(tmp_path)) == [2, 9, 123456789]
    assert len(list_files(tmp_path)) == 3


def test_no_spool_yet_is_an_empty_one(tmp_path):
    assert list_spool(tmp_path / "none") == {}


def test_deleting_twice_is_no_error(written):
    delete(written)
    delete(written)
    assert list_spool(written.parent.parent) == {}


def test_sigkill_while_writing_leaves_no_torn_visible_file(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from agentrl.handoff.spool import SpoolWriter\n"
        "from agentrl.handoff.trajectory import Group, Trajectory\n"
        "writer, size = SpoolWriter(Path(sys.argv[1]), 0), 20_000\n"
        "for draw in range(10_000):\n"
        "    row = Trajectory(run='r', draw=draw, task_id='t', attempt=0, node=0, reward=1.0,\n"
        "        tokens=[7] * size, logprobs=[0.0] * size, loss_mask=[True] * size,\n"
        "        cause='submitted', turns=1)\n"
        "    writer.write(Group(draw=draw, task_id='t', trajectories=(row,) * 8))\n"
        "    print('written', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    for _ in range(3):
        assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [read_group(path).draw for path in list_spool(tmp_path).values()][:3] == [0, 1, 2]


def test_token_fields_take_lists_and_are_read_only():
    made = trajectory(tokens=[1, 2], logprobs=(0.0, -1.0), loss_mask=[0, 1])
    assert made.tokens.dtype == np.int32
    assert made.loss_mask.tolist() == [False, True]
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 5
    with pytest.raises(ValueError, match="must be equal"):
        trajectory(tokens=[1])


def with_experts(size, attempt=0, *, layers=3, per_token=2, kind=np.uint8):
    rng = np.random.default_rng(size + attempt)
    found = rng.integers(0, np.iinfo(kind).max, (size, layers, per_token)).astype(kind)
    return trajectory(attempt=attempt, size=size, experts=found)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    kind=st.sampled_from([np.uint8, np.uint16]),
    has=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_experts_survive_the_bytes_beside_rows_without_any(sizes, kind, has, tmp_path_factory):
    rows = tuple(
        with_experts(size, attempt, kind=kind) if told else trajectory(attempt=attempt, size=size)
        for attempt, (size, told) in enumerate(zip(sizes, has, strict=False))
    )
    made = Group(draw=42, task_id="t", trajectories=rows)
    found = decode_group(b"".join(encode_group(made)), tmp_path_factory.getbasetemp())
    assert found == made
    kinds = [row.experts.dtype for row in found.trajectories if row.experts.size]
    assert all(one == kind for one in kinds)


def test_other_readers_find_experts_as_bytes_and_their_shape(hand_on):
    made = Group(draw=42, task_id="t", trajectories=(with_experts(9), trajectory()))
    table = pq.ParquetFile(hand_on(made), page_checksum_verification=True).read()
    assert table.column("experts").to_pylist() == [made.trajectories[0].experts.tobytes(), b""]
    assert table.column("expert_layers").to_pylist() == [3, 0]
    assert table.column("experts_per_token").to_pylist() == [2, 0]


def test_a_file_from_before_experts_were_kept_holds_none():
    found = read_group(Path(__file__).parent / "golden" / "00000042.parquet")
    assert found == group()
    assert all(row.experts.size == 0 for row in found.trajectories)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (np.zeros((4, 3, 2), np.uint8), "experts of 4 tokens, 5 are there"),
        (np.zeros((5, 3, 2), np.int64), "must be uint8 or uint16"),
        (np.zeros((5, 6), np.uint8), "of 3 dimensions"),
    ],
)
def test_experts_that_are_not_of_the_tokens_are_no_trajectory(experts, words):
    with pytest.raises(ValueError, match=words):
        trajectory(experts=experts)
