"""Events: what is written is read again, and what is no event is counted, never guessed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import events

KINDS = get_args(events.AnyEvent)
finite = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {float: finite, int: st.integers(-(2**53), 2**53)}
VALUES[str] = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
for kind, values in VALUES.items():
    st.register_type_strategy(kind, values)
any_event = st.one_of(
    [
        st.builds(
            kind, **{item.name: st.from_type(item.type) for item in msgspec.structs.fields(kind)}
        )
        for kind in KINDS
    ]
)


def write(folder: Path, *found: events.AnyEvent, role: str = "trainer") -> Path:
    writer = events.EventWriter(folder, role, node="a")
    for event in found:
        writer.write(event)
    writer.close()
    return writer.path


def drop(at: float) -> events.Drop:
    return events.Drop(what="group", reason="stale", end=at)


@settings(max_examples=40, deadline=None)
@given(st.lists(any_event, max_size=8))
def test_events_are_read_as_they_were_written(tmp_path_factory, found) -> None:
    path = write(tmp_path_factory.mktemp("events"), *found)
    assert list(events.read(path)) == found


@settings(max_examples=40, deadline=None)
@given(st.lists(any_event, min_size=1, max_size=4), st.data())
def test_a_file_cut_anywhere_gives_its_whole_lines(tmp_path_factory, found, data) -> None:
    path = write(tmp_path_factory.mktemp("events"), *found)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    rejected: Counter[str] = Counter()
    read = list(events.read(path, rejected))
    assert read == found[: whole[:cut].count(b"\n")]
    torn = cut > 0 and not whole[:cut].endswith(b"\n")
    assert rejected == ({"torn last line": 1} if torn else {})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=5))
def test_lines_that_are_no_events_are_counted_one_each(tmp_path_factory, junk) -> None:
    path = tmp_path_factory.mktemp("events") / "junk-a-1.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in junk))
    rejected: Counter[str] = Counter()
    assert list(events.read(path, rejected)) == []
    assert sum(rejected.values()) == len(junk)


def test_unknown_fields_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trainer-a-1.jsonl"
    path.write_text('{"kind":"drop","what":"group","reason":"stale","of_tomorrow":[1]}\n')
    assert list(events.read(path)) == [events.Drop(what="group", reason="stale")]


def test_an_unknown_kind_is_told_from_garbage(tmp_path: Path) -> None:
    path = tmp_path / "trainer-a-1.jsonl"
    path.write_bytes(b'{"kind":"of_tomorrow"}\n\0\0\0\n{"kind":"drop"}\n')
    rejected: Counter[str] = Counter()
    assert list(events.read(path, rejected)) == []
    assert rejected == {"unknown kind": 1, "not an event": 2}


def test_a_folder_is_read_in_the_order_of_ends(odd_path: Path) -> None:
    write(odd_path, drop(3), drop(1), role="trainer")
    write(odd_path, drop(2), role="inference")
    assert [event.end for event in events.read_folder(odd_path)] == [1, 2, 3]


def test_a_file_that_goes_between_listing_and_reading_is_counted(tmp_path: Path) -> None:
    write(tmp_path, drop(1), role="trainer")
    (tmp_path / "inference-a-1.jsonl").symlink_to(tmp_path / "gone")
    rejected: Counter[str] = Counter()
    assert len(events.read_folder(tmp_path, rejected)) == 1
    assert rejected == {events.GONE: 1}


def test_a_folder_that_is_not_there_holds_no_events(tmp_path: Path) -> None:
    assert events.read_folder(tmp_path / "nowhere") == []


def test_the_file_is_named_by_role_node_and_process(tmp_path: Path) -> None:
    assert write(tmp_path).name == f"trainer-a-{os.getpid()}.jsonl"


def test_a_second_writer_of_the_process_appends(tmp_path: Path) -> None:
    write(tmp_path, drop(1))
    assert list(events.read(write(tmp_path, drop(2)))) == [drop(1), drop(2)]


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from agentrl import events;"
        "w = events.EventWriter(Path(sys.argv[1]), 'trainer', node='a');"
        "w.write(events.Drop(what='group', reason='stale', end=1.0)); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert events.read_folder(tmp_path) == [drop(1.0)]


def test_every_kind_has_a_name_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(KINDS)
    assert set(KINDS) == set(events.Event.__subclasses__())
