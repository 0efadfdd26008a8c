"""Event files that killed writers, requeues and apart clocks left: counted, explained, right."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl import events
from agentrl.errors import ConfigError, RecordError
from analysis import fresh, parallel, reader, store, trajectory_time
from analysis.reader import Share
from analysis.run_files import load_run
from analysis.store import Store, event_files, open_store
from analysis.window import Window

AT = 1_790_000_000.0


def grade(name: str, at: float) -> events.Grade:
    return events.Grade(trajectory=name, resolved=True, start=AT + at - 1, end=AT + at)


def write(folder: Path, name: str, *found: events.Event, more: bytes = b"") -> Path:
    role, node = name.split("-")
    writer = events.EventWriter(folder / "events", role, node=node)
    for event in found:
        writer.write(event)
    writer.close()
    with writer.path.open("ab") as file:
        file.write(more)
    return writer.path


def read(folder: Path) -> Store:
    return open_store(folder / "events", event_files(folder / "events"), None)


def test_events_come_back_as_they_were_written(odd_path: Path) -> None:
    step = events.Step(
        step=1, version=1, wait_s=1, logprob_s=0, update_s=2, publish_s=0, metrics={"reward": 0.5},
        start=AT, end=AT + 3,
    )  # fmt: skip
    group = events.GroupEvent(draw=1, task="ü", rewards=[1.0, None], versions=[0, 1], end=AT)
    write(odd_path, "trainer-a", step, group)
    found = read(odd_path)
    assert found.of(events.Step) == [step]
    assert found.of(events.GroupEvent) == [group]


def test_every_kind_of_damage_is_counted_under_its_own_name(tmp_path: Path) -> None:
    good = b'{"kind":"grade","trajectory":"t","resolved":true,"end":1790000005.0}'
    more = b"\n".join(
        (
            bytes(300),  # a hole that a network filesystem left
            bytes(7) + good,
            b'{"kind":"grade","traj' + good.replace(b"5.0", b"6.0"),
            b'{"kind":"of tomorrow","x":1}',
            b'{"kind":"grade","resolved":true}',
            b"[1,2]",
            b"\xff\xfe not JSON",
            b'{"kind":"grade","trajectory":"u","resol',
        )
    )
    write(tmp_path, "inference-a", grade("t", 1), more=more)
    found = read(tmp_path).index.found
    assert found.rejected == {
        "NUL bytes alone": 1, "torn by the next line": 1, "unknown kind of tomorrow": 1,
        "grade without what it needs": 1, "not an event": 1, "not JSON": 1, "torn last line": 1,
    }  # fmt: skip
    assert found.mended == {"NUL bytes around an event": 1}
    assert len(read(tmp_path)) == 3


def test_a_step_whose_metric_was_nan_is_read_without_it(tmp_path: Path) -> None:
    step = events.Step(
        step=1, version=1, wait_s=1, logprob_s=0, update_s=2, publish_s=0, start=AT, end=AT + 3,
        metrics={"reward": 0.5, "grad_norm": float("nan")},
    )  # fmt: skip
    write(tmp_path, "trainer-a", step)
    found = read(tmp_path)
    assert found.of(events.Step)[0].metrics == {"reward": 0.5}
    assert found.index.found.mended == {"numbers that are none (NaN) left out": 1}


def test_numbers_and_brackets_without_end_are_lines_left_out(tmp_path: Path) -> None:
    call = b'{"kind":"grade","trajectory":"t","resolved":true,"passed":%d,"end":1790000005.0}\n'
    deep = b'{"kind":"grade","trajectory":"t","resolved":true,"x":' + b"[" * 99_999 + b"\n"
    write(tmp_path, "inference-a", grade("t", 1), more=call % 10**30 + deep)
    found = read(tmp_path)
    assert (len(found), sum(found.index.found.rejected.values())) == (1, 2)


def test_times_of_a_clock_that_was_not_set_are_left_out_and_said(tmp_path: Path) -> None:
    some = [grade(f"{i}/0/0", i) for i in range(9)]
    write(tmp_path, "inference-a", *some, grade("9/0/0", 60 - AT))
    run = load_run(tmp_path)
    assert len(run.store) == 9
    assert any("1 events left out: over 400 days" in problem for problem in run.problems)


def test_spans_of_a_clock_that_was_set_back_count_as_no_time_and_are_said(tmp_path: Path) -> None:
    back = events.Grade(trajectory="0/0/0", resolved=True, start=AT + 9, end=AT + 2)
    write(tmp_path, "inference-a", back, grade("1/0/0", 9))
    run = load_run(tmp_path)
    assert [each.seconds for each in run.of(events.Grade)] == [0, 1]
    assert any("1 spans end before they begin" in problem for problem in run.problems)


@pytest.mark.parametrize("what", ["a link to itself", "a link to nothing", "a folder", "a pipe"])
def test_what_is_no_file_among_the_event_files_is_named(tmp_path: Path, what: str) -> None:
    path = write(tmp_path, "inference-a", grade("1/0/0", 9)).with_name("trainer-b-1.jsonl")
    if what.startswith("a link"):
        path.symlink_to(path if "itself" in what else tmp_path / "nothing")
    else:
        (os.mkfifo if what == "a pipe" else os.mkdir)(path)
    run = load_run(tmp_path)
    assert len(run.store) == 1
    assert "events/trainer-b-1.jsonl is no file that can be read: left out." in run.problems
    assert fresh.key([tmp_path], ()) == fresh.key([tmp_path], ())


def test_a_file_that_goes_between_listing_and_reading_is_counted_and_said(tmp_path: Path) -> None:
    write(tmp_path, "inference-a", grade("1/0/0", 9))
    gone = write(tmp_path, "trainer-b", grade("1/0/1", 9))
    files = event_files(gone.parent)
    gone.unlink()
    found = open_store(gone.parent, files, None)
    assert (len(found), found.index.found.rejected) == (1, {events.GONE: 1})


def test_a_file_that_grows_while_it_is_read_gives_what_was_whole_when_it_was_listed(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "inference-a", *(grade(f"{i}/0/0", i) for i in range(9)))
    files = event_files(path.parent)
    with path.open("ab") as file:
        file.write(b'{"kind":"grade","trajectory":"9/0/0","resol')
    found = open_store(path.parent, files, None)
    assert (len(found), found.index.found.rejected) == (9, {})


def test_fields_of_another_version_are_named(tmp_path: Path) -> None:
    write(
        tmp_path, "inference-a",
        more=b'{"kind":"grade","trajectory":"t","resolved":true,"mood":3,"end":1790000005.0}\n',
    )  # fmt: skip
    assert any("grade.mood" in problem for problem in load_run(tmp_path).problems)


def test_a_segment_written_again_after_a_requeue_counts_once(tmp_path: Path) -> None:
    some = [grade(f"{i}/0/0", i) for i in range(9)]
    first = write(tmp_path, "inference-a", *some)
    first.rename(first.with_name("inference-a-1.jsonl"))
    write(tmp_path, "inference-a", *some[3:], grade("9/0/0", 9))
    found = read(tmp_path)
    assert (len(found), found.index.mends.repeats) == (10, {"grade": 6})


def test_the_same_second_on_two_nodes_is_no_repeat(tmp_path: Path) -> None:
    write(tmp_path, "inference-a", grade("0/0/0", 1))
    write(tmp_path, "inference-b", grade("0/0/0", 1))
    assert read(tmp_path).index.mends.repeats == {}


def versions(phase: str, *times: float) -> list[events.VersionEvent]:
    return [
        events.VersionEvent(version=v, phase=phase, start=AT + at, end=AT + at)
        for v, at in enumerate(times)
    ]


@pytest.mark.parametrize(("late", "seconds"), [(-40.0, -43.0), (60.0, 57.0)])
def test_a_node_whose_clock_is_apart_is_moved(tmp_path: Path, late: float, seconds: float) -> None:
    write(tmp_path, "trainer-t", *versions("published", 0, 100, 200))
    for node in ("a", "b"):
        write(tmp_path, f"inference-{node}", *versions("proved", 3, 103, 204))
    write(
        tmp_path, "inference-c", *versions("proved", late, late + 100, late + 200), grade("x", 50)
    )
    found = read(tmp_path)
    (skew,) = found.index.mends.skews
    assert (skew.node, skew.seconds) == ("c", seconds)
    assert found.of(events.Grade)[0].end == AT + 50 - seconds
    assert f"{abs(seconds)} s" in skew.words


def test_clocks_that_agree_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "trainer-t", *versions("published", 0, 100, 200))
    write(tmp_path, "inference-a", *versions("proved", 3, 103, 204))
    write(tmp_path, "inference-b", *versions("proved", 3.3, 103.1, 209))
    assert read(tmp_path).index.mends.skews == []


def test_a_role_that_left_an_exit_record_and_no_events_is_missed(tmp_path: Path) -> None:
    write(tmp_path, "inference-0", grade("t", 1))
    for name in ("inference-0", "inference-1"):
        path = tmp_path / "attempts" / "0001" / "exit" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    said = [problem for problem in load_run(tmp_path).problems if "exit record" in problem]
    assert len(said) == 1
    assert "inference-1" in said[0]


def test_several_processes_read_what_one_does(tmp_path: Path) -> None:
    text = b'{"kind":"grade","trajectory":"%d/0/0","resolved":true,"end":%d,"text":"%s"}\n'
    lines = [text % (i, 1000 + i, b"x" * (i * 37 % 10000)) for i in range(8000)]
    write(tmp_path, "inference-a", more=b"".join(lines[:7000]))
    write(tmp_path, "inference-b", more=b"".join(lines[7000:]) + b'{"kind":"gr')
    folder = tmp_path / "events"
    whole = store.shares(folder, event_files(folder))
    alone, found = parallel.read_all(whole)
    both, found_by_both = parallel.read_all(whole, alone=0)
    key = [("end", "ascending")]
    assert len(parallel.cut(whole)) > 2
    assert both["grade"].sort_by(key).equals(alone["grade"].sort_by(key))
    assert (len(both["grade"]), found_by_both) == (8000, found)
    assert found.rejected == {"torn last line": 1}


def test_a_reader_that_dies_is_an_error_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").mkdir()
    odd = Share(file=0, path=str(tmp_path / "odd.jsonl"), start=0, end=1)
    with pytest.raises((RecordError, IsADirectoryError), match="odd"):
        parallel.read_all([odd], alone=0)


def test_a_line_longer_than_a_block_is_whole(tmp_path: Path) -> None:
    line = b'{"kind":"grade","trajectory":"t","resolved":true,"end":9,"text":"%s"}\n'
    write(tmp_path, "inference-a", more=line % (b"x" * (reader.BLOCK + 10)) + line % b"")
    assert len(read(tmp_path)) == 1  # the two are equal in all that is read


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path) -> None:
    path = write(tmp_path, "inference-a", grade("0/0/0", 1))
    cache = tmp_path / "report" / "cache" / "events"
    load_run(tmp_path)
    (table,) = cache.glob("*/grade.parquet")
    assert pq.read_table(table).num_rows == 1
    table.write_bytes(table.read_bytes()[:40])  # a crash: it is read anew
    assert len(load_run(tmp_path).store) == 1
    with path.open("ab") as file:
        file.write(b'{"kind":"grade","trajectory":"1/0/0","resolved":true,"end":1790000009.0}\n')
    assert len(load_run(tmp_path).store) == 2
    assert len(list(cache.glob("*/grade.parquet"))) == 1


def test_spans_of_an_attempt_that_was_killed_are_not_another_ones(tmp_path: Path) -> None:
    def call(start: float, end: float) -> events.ModelCall:
        return events.ModelCall(
            trajectory="0/0/0", engine="e", turn=0, prompt_tokens=1, new_tokens=1,
            start=AT + start, end=AT + end,
        )  # fmt: skip

    done = events.TrajectoryEvent(
        trajectory="0/0/0", draw=0, task="t", attempt=0, cause="submitted", reward=1.0,
        start=AT + 100, end=AT + 120,
    )  # fmt: skip
    write(tmp_path, "inference-a", call(0, 30), call(101, 105), done)
    (row,) = trajectory_time.table(load_run(tmp_path))
    assert row.model == 4


def test_a_window_is_given_by_clock_or_from_the_begin(tmp_path: Path) -> None:
    write(tmp_path, "inference-a", *(grade(f"{i}/0/0", 60 * i + 1) for i in range(10)))
    run = load_run(tmp_path, window=Window(since="2m", until="5m"))
    assert [event.end - AT for event in run.of(events.Grade)] == [121, 181, 241]
    assert any("2m to 5m" in problem for problem in run.problems)
    with pytest.raises(ConfigError, match="time 'noon'"):
        Window(since="noon")
