"""What a run directory holds, read once: config, events, ledger, evaluations, SFT losses.

A folder of another stack's logs is read by `sources` into the same shape.

Everything may be missing or torn: what is not there is named in `Run.problems`, never guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl import config as schema
from agentrl.errors import ConfigError, RecordError
from agentrl.events import Event
from analysis.evaluations import Evaluation, read_evaluation
from analysis.store import EventFile, Store, event_files, from_events, is_readable, open_store
from analysis.window import Window

E = TypeVar("E", bound=Event)
S = TypeVar("S", bound=msgspec.Struct)
Json = dict[str, object]
MARKS = ("config.yaml", "events", "evaluations", "sft")
"""A folder with one of these is a run of ours; another one holds logs of other stacks."""
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
    store: Store
    """Events of the training's roles, each kind ordered by its end."""
    aside: int
    """Events of fine-tuning and evaluation, where they write to the same folder."""
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

    @property
    def rejected(self) -> dict[str, int]:
        """Event lines that could not be read, by reason."""
        return self.store.index.found.rejected

    def within(self, since: float, until: float) -> Run:
        """Return the run with only the events that ended in [since, until]."""
        return replace(self, store=self.store.within(since, until))

    def of(self, kind: type[E]) -> list[E]:
        """Return the training's events of one kind, ordered by their end."""
        return self.store.of(kind)


def load_run(folder: Path, *, window: Window | None = None) -> Run:
    """Read the run in `folder`. Raises RecordError if it isn't there or cannot hold a report."""
    if not folder.is_dir():
        raise RecordError(f"run {folder}: no such folder (from {Path.cwd()}); give a run directory")
    if not os.access(max(folder / "report", folder, key=Path.is_dir), os.W_OK):
        raise RecordError(
            f"report on {folder}: {folder / 'report'} cannot be written; link the run's files and "
            "folders, all but report, into a folder of yours, and report on that"
        )
    problems: list[str] = []
    is_ours = any((folder / name).exists() for name in MARKS)
    found, told = _of_others(folder, problems) if not is_ours else (None, ())
    is_others = bool(found or told)
    store, aside = (found or from_events([]), 0) if is_others else _events(folder, problems)
    if window:
        store = store.within(*window.bounds(store.span()[0]))
        problems.append(f"Only events from {window.words} are shown.")
    return Run(
        folder=folder,
        config=None if is_others else _config(folder / "config.yaml", problems),
        store=store,
        aside=aside,
        ledger=tuple(read_lines(folder / "ledger.jsonl", Attempt, problems)),
        evaluations=told if is_others else _evaluations(folder / "evaluations", problems),
        sft=_sft(folder / "sft", problems),
        provenance={} if is_others else _provenance(folder / "provenance.json", problems),
        problems=tuple(problems),
    )


def own_files(folder: Path) -> list[EventFile]:
    """List the event files of a run's training roles."""
    files = event_files(folder / "events")
    return [file for file in files if not file.name.startswith(ASIDE)]


def read_lines(path: Path, kind: type[S], problems: list[str]) -> Iterator[S]:
    """Yield what a JSONL file holds; lines that are not of `kind` are told in `problems`."""
    decoder = msgspec.json.Decoder(kind)
    bad = 0
    for line in _bytes(path, problems).splitlines() if path.exists() else ():
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            bad += 1
    if bad:
        problems.append(f"{path.parent.name}/{path.name}: {bad} lines are torn or not as expected.")


def _of_others(folder: Path, problems: list[str]) -> tuple[Store | None, tuple[Evaluation, ...]]:
    from analysis.sources.folder import read_folder

    events, evaluations, said = read_folder(folder)
    problems += said
    return (from_events(events) if events else None), tuple(evaluations)


def _events(folder: Path, problems: list[str]) -> tuple[Store, int]:
    own = own_files(folder)
    other = [file for file in event_files(folder / "events") if file.name.startswith(ASIDE)]
    store = open_store(folder / "events", own, folder / "report" / "cache" / "events")
    if not len(store):
        problems.append("events/ holds no event of a training: no step and no trajectory is known.")
    problems += [*_damage(store), *_absent(folder, own)]
    return store, len(open_store(folder / "events", other, None)) if other else 0


def _damage(store: Store) -> Iterator[str]:
    """Say what was wrong with the event files, and what was done about it."""
    index = store.index
    for reason, count in sorted(index.found.rejected.items()):
        yield f"events/: {count:,} of {index.found.lines:,} lines left out: {reason}."
    for reason, count in sorted(index.found.mended.items()):
        yield f"events/: {count:,} lines read although damaged: {reason}."
    for words in index.mends.words:
        yield f"events/: {words}"
    if index.found.unknown_fields:
        names = ", ".join(sorted(index.found.unknown_fields))
        yield f"events/: fields that this version does not read (in a sample of lines): {names}."


def _absent(folder: Path, files: list[EventFile]) -> Iterator[str]:
    """Name what stands among the event files and is none, and roles without events.

    A role has none if it left an exit record all the same.
    """
    for path in sorted(folder.glob("events/*.jsonl")):
        if not is_readable(path):
            yield f"events/{path.name} is no file that can be read: left out."
    known = {f"{file.role}-{file.node}" for file in files}
    told = {path.stem for path in folder.glob("attempts/*/exit/*.json")}
    for name in sorted(told - known):
        yield f"events/ has no file of {name}, which left an exit record: its events are missing."


def _bytes(path: Path, problems: list[str]) -> bytes:
    """Return a file's bytes; none, and why in `problems`, where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        problems.append(f"{path.parent.name}/{path.name} cannot be read: {error.strerror}.")
        return b""


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
            return msgspec.json.decode(_bytes(path, problems), type=Sft)
        except msgspec.DecodeError as error:
            problems.append(f"sft/{path.name}: {error}.")
    return None


def _provenance(path: Path, problems: list[str]) -> Json:
    if not path.exists():
        problems.append("provenance.json is missing: which code ran is unknown.")
        return {}
    try:
        found = json.loads(_bytes(path, problems))
    except ValueError as error:
        problems.append(f"provenance.json is not JSON: {error}.")
        return {}
    return found if isinstance(found, dict) else {}
