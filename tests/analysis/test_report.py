"""The page: self-contained, escaped, and there for every run however little it holds."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_run import Made, make_run, tear, write_sft

from agentrl import events
from agentrl.errors import RecordError
from analysis.report import write_report

pytestmark = pytest.mark.slow  # whole reports are drawn

HOSTILE = "<script>alert('x')</script>"


class Names(HTMLParser):
    """Collects the names of tags and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [
            str(value)
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "xlink:href")
            and not str(value).startswith(("#", "data:"))
        ]


def parse(page: Path) -> Names:
    names = Names()
    names.feed(page.read_text())
    return names


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return write_report([make_run(folder, Made(steps=12, resume_at=6, hostile=HOSTILE))]).page


def test_the_page_is_in_the_runs_report_folder(page: Path) -> None:
    assert page.parts[-3:] == ("demo", "report", "index.html")


def test_provenance_is_told_for_people(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"<td>2023-11-1\d \d\d:\d\d:\d\d", text)
    assert "None</td>" not in text


def test_the_page_loads_nothing_from_elsewhere(page: Path) -> None:
    found = parse(page)
    assert found.loads == []
    assert not found.tags & {"script", "link", "img", "iframe", "object"}
    assert "@import" not in page.read_text()
    assert not re.search(r"url\((?!#)", page.read_text())


def test_text_of_a_run_is_escaped(page: Path) -> None:
    text = page.read_text()
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(" in text


def test_hostile_causes_and_reasons_are_escaped_everywhere(tmp_path: Path) -> None:
    writer = events.EventWriter(tmp_path / "events", "trainer", node="a")
    lost = events.TrajectoryEvent(
        trajectory=HOSTILE, draw=0, task=HOSTILE, attempt=0, cause=HOSTILE, end=1.0
    )
    writer.write(lost)
    writer.write(events.Drop(what=HOSTILE, reason=HOSTILE))
    writer.write(events.EngineFault(engine=HOSTILE, cause=HOSTILE, detail=HOSTILE))
    writer.close()
    text = write_report([tmp_path]).page.read_text()
    assert "<script" not in text
    assert "script" not in parse(tmp_path / "report" / "index.html").tags


def test_the_summary_names_each_number_that_matters(page: Path) -> None:
    text = page.read_text().replace("\N{NO-BREAK SPACE}", " ")
    for words in (
        "pass@1 after SFT", "pass@1 after RL", "Trajectories an hour", "Trainer idle",
        "Engines idle", "Lost trajectories", "95 % intervals", "control for sharpening",
    ):  # fmt: skip
        assert words in text


def test_the_page_follows_light_and_dark_and_narrow_screens(page: Path) -> None:
    text = page.read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "var(--ink)" in text[text.index("<svg") :]


def test_an_empty_run_gives_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    text = write_report([tmp_path]).page.read_text()
    for words in ("Missing or unreadable", "No optimizer step was recorded", "pass@1 is unknown"):
        assert words in text


def test_a_run_that_was_only_fine_tuned_gives_a_page(tmp_path: Path) -> None:
    from random import Random

    write_sft(tmp_path, Random(0))
    text = write_report([tmp_path]).page.read_text()
    assert "It was fine-tuned only" in text
    assert "No trajectory was recorded" in text


def test_torn_events_are_counted_on_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "demo", Made(steps=3, resume_at=0))
    for path in (tmp_path / "demo" / "events").iterdir():
        tear(path)
    text = write_report([tmp_path / "demo"]).page.read_text()
    assert "torn last line" in text
    assert "2 unreadable event lines" in text


def test_several_runs_stand_on_one_page(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    text = write_report(folders).page.read_text()
    assert "Training report: one" in text
    assert "Training report: two" in text


def test_a_report_on_no_run_is_refused() -> None:
    with pytest.raises(RecordError, match="name a run directory"):
        write_report([])
