"""What an adapter makes of one file, and how it says what it could not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from agentrl.events import Event
from analysis.evaluations import Evaluation

EXAMPLE_CHARACTERS = 160
"""Of a line that is shown as an example."""
REASON_CHARACTERS = 120
T = TypeVar("T")


@dataclass(kw_only=True)
class Adapted:
    """The events of one or more files of one source."""

    events: list[Event] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    lines: int = 0
    """Lines, or for files of one JSON document documents, that were looked at."""
    known: int = 0
    """Those that gave something."""
    passed: Counter[str] = field(default_factory=Counter)
    """Lines of a kind that is known and holds nothing for a figure, by kind."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Lines that are of no known kind, by their shape."""
    examples: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures has to know: an assumption, something left out."""

    def refuse(self, reason: str, line: str = "") -> None:
        """Count a line that is not understood, with one example of each reason."""
        reason = reason[:REASON_CHARACTERS]
        self.unknown[reason] += 1
        self.examples.setdefault(reason, line.strip()[:EXAMPLE_CHARACTERS])

    def decoded(self, data: bytes | str, kind: type[T], name: str) -> T | None:
        """Return JSON as a `kind`; another shape is counted with the place that differs."""
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            self.refuse(f"JSON of another shape: {error}", name)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.refuse("not JSON", name)
        return None

    def moment(self, text: str, line: str) -> float | None:
        """Return `seconds` of a time; a text that is none is counted."""
        try:
            return seconds(text)
        except (ValueError, OverflowError):
            self.refuse("a time that is none", line)
            return None

    def say(self, source: str) -> list[str]:
        """Return what the report says of this source."""
        read = f"{source}: {self.known:,} of {self.lines:,} lines or files gave data"
        others = ", ".join(f"{count:,} {kind}" for kind, count in self.passed.most_common())
        said = [f"{read}; known and not needed: {others}." if others else f"{read}."]
        for reason, count in self.unknown.most_common(12):
            example = f", such as “{self.examples[reason]}”" if self.examples[reason] else ""
            said.append(f"{source}: {count:,} not understood ({reason}){example}.")
        return said + [f"{source}: {note}" for note in self.notes]


class Source(Protocol):
    """One format."""

    name: str

    def fits(self, path: Path, head: str) -> bool:
        """Tell by name and the first some thousand characters whether a file is of this kind."""

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add what the files hold."""


def since_epoch(at: datetime) -> float:
    """Return seconds since the epoch; a time without a zone is taken as UTC."""
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def seconds(text: str) -> float:
    """Return `since_epoch` of an ISO 8601 time."""
    return since_epoch(datetime.fromisoformat(text.strip()))
