"""What a run directory holds, read once: config, events, ledger, evaluations, SFT losses.

Everything may be missing or torn: what is not there is named in `Run.problems`, never guessed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl import config as schema
from agentrl.errors import ConfigError, RecordError
from agentrl.events import AnyEvent, Event, read
from analysis.evaluations import Evaluation, read_evaluation

E = TypeVar("E", bound=Event)
S = TypeVar("S", bound=msgspec.Struct)
Json = dict[str, object]
ASIDE = ("sft", "eval")
"""Roles whose events are not the training's: each role that starts with one of these."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ledger.jsonl: a finished launch attempt."""

    attempt: int
    began: str = ""
    ended: str = ""
    action: str = ""
    step_begin: int = 0
    step_end: int = 0
    restarts: int = 0
    started: float = 0.0
    finished: float = 0.0


class Sft(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of the fine-tuning."""

    steps: int
    losses: list[float]
    """Of the assistant's tokens, nats, at equal distances over the steps."""
    tokens: int = 0
    seconds: float = 0.0
    """Of its last uninterrupted stretch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The content of one run directory."""

    folder: Path
    config: schema.RunConfig | None
    events: tuple[AnyEvent, ...]
    """Of the training's roles, ordered by their end."""
    aside: tuple[AnyEvent, ...]
    """Of fine-tuning and evaluation, where they write to the same folder."""
    rejected: dict[str, int]
    """Event lines that could not be read, by reason."""
    ledger: tuple[Attempt, ...]
    evaluations: tuple[Evaluation, ...]
    sft: Sft | None
    provenance: Json
    problems: tuple[str, ...]
    """What is missing or unreadable, one sentence each."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def of(self, kind: type[E]) -> list[E]:
        """Return the training's events of one kind, ordered by their end."""
        return [event for event in self.events if isinstance(event, kind)]


def load_run(folder: Path) -> Run:
    """Read the run in `folder`. Raises RecordError if there is no such folder."""
    if not folder.is_dir():
        raise RecordError(f"run {folder}: no such folder (from {Path.cwd()}); give a run directory")
    problems: list[str] = []
    rejected: Counter[str] = Counter()
    own, aside = _events(folder / "events", rejected, problems)
    return Run(
        folder=folder,
        config=_config(folder / "config.yaml", problems),
        events=own,
        aside=aside,
        rejected=dict(rejected),
        ledger=tuple(read_lines(folder / "ledger.jsonl", Attempt, problems)),
        evaluations=_evaluations(folder / "evaluations", problems),
        sft=_sft(folder / "sft", problems),
        provenance=_provenance(folder / "provenance.json", problems),
        problems=tuple(problems),
    )


def read_lines(path: Path, kind: type[S], problems: list[str]) -> Iterator[S]:
    """Yield what a JSONL file holds; lines that are not of `kind` are told in `problems`."""
    decoder = msgspec.json.Decoder(kind)
    bad = 0
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            bad += 1
    if bad:
        problems.append(f"{path.parent.name}/{path.name}: {bad} lines are torn or not as expected.")


def _events(
    folder: Path, rejected: Counter[str], problems: list[str]
) -> tuple[tuple[AnyEvent, ...], tuple[AnyEvent, ...]]:
    own: list[AnyEvent] = []
    aside: list[AnyEvent] = []
    for path in sorted(folder.glob("*.jsonl")):
        into = aside if path.name.startswith(ASIDE) else own
        into.extend(read(path, rejected))
    if not own:
        problems.append("events/ holds no event of a training: no step and no trajectory is known.")
    return _by_end(own), _by_end(aside)


def _by_end(found: list[AnyEvent]) -> tuple[AnyEvent, ...]:
    return tuple(sorted(found, key=lambda event: event.end or event.start))


def _config(path: Path, problems: list[str]) -> schema.RunConfig | None:
    try:
        return schema.load(path)
    except ConfigError as error:
        problems.append(f"config.yaml: {error}")
        return None


def _evaluations(folder: Path, problems: list[str]) -> tuple[Evaluation, ...]:
    found: list[Evaluation] = []
    for path in sorted(folder.glob("*/summary.json")):
        try:
            found.append(read_evaluation(path))
        except RecordError as error:
            problems.append(str(error))
    if not found:
        problems.append("evaluations/ holds no summary: pass@1 is unknown.")
    return tuple(found)


def _sft(folder: Path, problems: list[str]) -> Sft | None:
    for path in sorted(folder.glob("*.sft.json")):
        try:
            return msgspec.json.decode(path.read_bytes(), type=Sft)
        except msgspec.DecodeError as error:
            problems.append(f"sft/{path.name}: {error}.")
    return None


def _provenance(path: Path, problems: list[str]) -> Json:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append("provenance.json is missing: which code ran is unknown.")
        return {}
    except ValueError as error:
        problems.append(f"provenance.json is not JSON: {error}.")
        return {}
    return found if isinstance(found, dict) else {}
