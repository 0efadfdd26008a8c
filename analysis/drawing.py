"""Figures drawn by two processes.

The second, `python -m analysis.drawing FOLDER PIPE`, takes from the pipe the numbers of jobs, which
lie in FOLDER as msgpack.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from analysis import work_pipe
from analysis.figure import Figure, Written

FEW = 3
"""Figures up to which a second process costs more than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure of one run."""

    figure: Figure[Any]
    rows: Sequence[Any]
    folder: Path

    def draw(self) -> None:
        self.figure.draw_files(self.rows, self.folder)

    @property
    def is_drawn(self) -> bool:
        return self.figure.is_drawn(self.rows, self.folder)

    @property
    def written(self) -> Written:
        return self.figure.written(self.rows, self.folder)


class _Message(msgspec.Struct, frozen=True):
    """A job as it goes to the other process."""

    figure: str
    folder: str
    rows: msgspec.Raw


def draw_all(jobs: Sequence[Job]) -> list[Written]:
    """Draw what isn't drawn yet; return all, in order. Raises RecordError in the helper's words."""
    missing = [job for job in jobs if not job.is_drawn]
    with TemporaryDirectory(prefix="agentrl-report-") as scratch:
        alone = len(missing) <= FEW or work_pipe.cores() == 1
        folders = [] if alone else [Path(scratch)]
        for number, job in enumerate(missing):
            if folders:
                _file(folders[0], number).write_bytes(_packed(job))
        with work_pipe.shared("analysis.drawing", folders, len(missing)) as taken:
            for number in taken:
                missing[number].draw()
    return [job.written for job in jobs]


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}.msgpack"


def _packed(job: Job) -> bytes:
    rows = msgspec.Raw(msgspec.msgpack.encode(job.rows))
    message = _Message(figure=job.figure.name, folder=str(job.folder), rows=rows)
    return msgspec.msgpack.encode(message)


def main(argv: Sequence[str]) -> int:
    """Draw the jobs in the folder argv[0] whose numbers the pipe argv[1] gives."""
    from analysis.report import ALL_FIGURES

    figures = {figure.name: figure for figure in ALL_FIGURES}
    for number in work_pipe.taken(int(argv[1])):
        data = _file(Path(argv[0]), number).read_bytes()
        message = msgspec.msgpack.decode(data, type=_Message)
        figure = figures[message.figure]
        decoder = msgspec.msgpack.Decoder(list[figure.row])  # type: ignore[name-defined]
        figure.draw_files(decoder.decode(message.rows), Path(message.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
