"""A run that is still written is read as the report reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import BEGIN, Made, make_run

from agentrl import events
from agentrl.config import RunConfig
from analysis import summary
from analysis.live import LiveRun
from analysis.run_files import Run, load_run
from analysis.standing import standing


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", Made(steps=12, resume_at=6))


def written_in_pieces(made: Path, folder: Path) -> Run:
    """Read a copy of the run that grows, its lines torn here and there."""
    (folder / "events").mkdir()
    live = LiveRun(folder, RunConfig())
    whole = {path.name: path.read_bytes() for path in (made / "events").iterdir()}
    for i in range(1, 8):
        for name, data in whole.items():
            with (folder / "events" / name).open("ab") as file:
                file.write(data[len(data) * (i - 1) // 7 : len(data) * i // 7])
        assert live.read()
    assert not live.read()
    return live.run()


def test_a_growing_run_read_bit_by_bit_is_the_run_that_the_report_reads(
    made: Path, tmp_path: Path
) -> None:
    live, whole = written_in_pieces(made, tmp_path).store, load_run(made).store
    assert live.index.found.rejected == {}
    assert {kind: len(table) for kind, table in live.tables.items()} == {
        kind: len(table) for kind, table in whole.tables.items()
    }
    for kind in (events.Step, events.TrajectoryEvent, events.EngineState):
        assert live.of(kind) == whole.of(kind)


def test_the_standing_is_told_in_the_numbers_of_the_report(made: Path, tmp_path: Path) -> None:
    now = standing(written_in_pieces(made, tmp_path))
    told = json.loads(json.dumps(summary.numbers(load_run(made))))
    assert now.step == told["step_time"]["steps"] == 12
    assert (now.reward, now.trainer_idle) == (told["reward"], told["step_time"]["trainer_idle"])
    work = told["throughput"]
    assert (now.per_hour, now.concurrent) == (work["trajectories_per_hour"], work["concurrent"])
    assert (now.engines_idle, now.tokens_per_s) == (work["engines_idle"], work["tokens_per_s"])
    losses = told["losses"]
    assert now.faults == sum(n for name, n in losses.items() if name.startswith("engine fault"))
    assert now.lost == sum(n for name, n in losses.items() if name.startswith("lost trajectory"))


def test_a_line_longer_than_what_is_looked_at_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "inference-a-1.jsonl"
    live = LiveRun(tmp_path, RunConfig())
    line = b'{"kind":"grade","trajectory":"t","resolved":true,"end":%d,"text":"%s"}\n'
    path.write_bytes(line % (BEGIN, b"") + line[:-3] % (BEGIN + 1, b"x" * 300_000))
    assert (live.read(), live.read(), len(live.run().store)) == (True, False, 1)
    with path.open("ab") as file:
        file.write(b'"}\n')
    assert (live.read(), len(live.run().store)) == (True, 2)


def test_a_run_without_events_stands_at_the_begin(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, RunConfig())
    assert not live.read()
    now = standing(live.run())
    assert (now.step, now.version, now.trajectories, now.engines) == (0, -1, 0, ())
