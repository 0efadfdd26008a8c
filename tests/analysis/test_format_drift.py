"""Other stacks' files with anything in any place: refused and counted, never a report's end."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from agentrl.events import Event
from analysis.sources.adapted import Adapted
from analysis.sources.folder import SOURCES
from analysis.store import from_events

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(path.relative_to(FIXTURES) for path in FIXTURES.rglob("*.*"))
ODD: tuple[object, ...] = (None, "x", -1, 10**40, 1e300, True, [], {}, [None], {"a": [{}]})
WORDS = ("", "9" * 40, "NaN", "-1", "\0", "2026-99-99T99:99:99", "{", "é")


def swapped(value: object, odd: object) -> Iterator[object]:
    """Yield `value` with each of its parts in turn replaced by `odd`."""
    yield odd
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in swapped(item, odd))
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in swapped(item, odd))


def texts(path: Path) -> Iterator[str]:
    """Yield the file with odd values, each in each place: of JSON by its parts, else by words."""
    text = path.read_text()
    try:
        whole = json.loads(text)
    except ValueError:
        random = Random(0)
        places = [match.span() for match in re.finditer(r"[\w.:-]+", text)]
        for low, high in random.sample(places, min(60, len(places))):
            yield from (text[:low] + word + text[high:] for word in WORDS)
        yield from ("", "\n", text[: len(text) // 2])
        return
    for odd in ODD:
        yield from map(json.dumps, swapped(whole, odd))


@pytest.mark.parametrize("name", FILES, ids=str)
def test_no_value_in_any_place_stops_an_adapter(name: Path, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / name.parts[0], tmp_path / name.parts[0])
    read = [path for path in FILES if path.parts[:-1] == name.parts[:-1]]
    if name.name == "trajectory.json":  # it is read along with its trial
        read = [name.parents[1] / "result.json"]
    fitting = {
        each: [p for p in read if each.fits(p, (FIXTURES / p).read_text())] for each in SOURCES
    }
    tried, found = 0, list[Event]()
    for text in texts(FIXTURES / name):
        (tmp_path / name).write_text(text)
        for source, paths in fitting.items():
            into = Adapted()
            source.read([tmp_path / path for path in paths], into)
            found += into.events
        tried += 1
    assert len(from_events(found)) <= len(found)
    assert tried > 60
