"""The events of a run while they are written: the report's reader, from where it stopped last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from analysis.parallel import Tables, joined, read_all
from analysis.reader import Found, Share
from analysis.run_files import Attempt, Run, own_files, read_lines
from analysis.store import EventFile, whole

TAIL = 1 << 16
"""Bytes of a file's end in which its last line's end is looked for at first."""


class LiveRun:
    """Reads what is new, and gives the run as the report would read it now."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._config = folder, config
        self._files: list[EventFile] = []
        self._ends: dict[str, int] = {}
        self._read: tuple[Tables, Found] = ({}, Found())

    def read(self) -> bool:
        """Take the whole lines that were appended; a torn one waits. Returns whether any came."""
        shares = self._appended(own_files(self._folder))
        if not shares:
            return False
        self._read = joined([self._read, read_all(shares)])
        self._ends |= {Path(share.path).name: share.end for share in shares}
        return True

    def run(self) -> Run:
        """Return what is known of the run by now; only what the training's events tell."""
        tables, found = self._read
        return Run(
            folder=self._folder,
            config=self._config,
            store=whole(tables, found, self._files),
            aside=0,
            ledger=tuple(read_lines(self._folder / "ledger.jsonl", Attempt, [])),
            evaluations=(),
            sft=None,
            provenance={},
            problems=(),
        )

    def _appended(self, now: Sequence[EventFile]) -> list[Share]:
        """Return the new whole lines of each file. A file keeps its number for good."""
        known = {file.name for file in self._files}
        self._files += [file for file in now if file.name not in known]
        numbers = {file.name: number for number, file in enumerate(self._files)}
        shares = []
        for file in now:
            path, start = self._folder / "events" / file.name, self._ends.get(file.name, 0)
            try:
                end = _last_line_end(path, start, file.size)
            except FileNotFoundError:
                continue  # it went after it was listed: nothing new is in it
            if end > start:
                number = numbers[file.name]
                shares.append(Share(file=number, path=str(path), start=start, end=end))
        return shares


def _last_line_end(path: Path, start: int, size: int) -> int:
    """Return where the last whole line of a file ends, `start` if none does after it."""
    if size <= start:
        return start
    length = min(TAIL, size - start)
    with path.open("rb") as file:
        while True:
            file.seek(size - length)
            found = file.read(length).rfind(b"\n") + 1
            if found or length == size - start:
                return size - length + found if found else start
            length = min(2 * length, size - start)
