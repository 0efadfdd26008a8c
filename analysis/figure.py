"""A figure from a run's files to PNG, SVG and CSV: what each figure module is to `report`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from agentrl.handoff.publish import publish_bytes
from analysis.fresh import code
from analysis.run_files import Run, load_run
from analysis.table import as_csv

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)
else:
    Row = TypeVar("Row")
RowIn = TypeVar("RowIn", contravariant=True)


class Draw(Protocol[RowIn]):
    def __call__(self, rows: Sequence[RowIn], path: Path, *, narrow: bool = False) -> None:
        """Write `path` as .svg and .png; the narrow form, for phones, as .svg alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """One drawn figure; `svg` is empty where there was nothing to draw."""

    name: str
    title: str
    finding: str
    svg: str = ""
    narrow_svg: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[Row]):
    name: str
    title: str
    row: type[Row]
    table: Callable[[Run], Sequence[Row]]
    draw: Draw[Row]
    finding: Callable[[Sequence[Row]], str]
    """A sentence or two with the numbers that the figure shows."""
    missing: str
    """What to say when there is no row."""

    def write(self, run: Run) -> Written:
        """Write the figure and its CSV into the run's report folder."""
        return self.write_rows(self.table(run), run.report)

    def write_rows(self, rows: Sequence[Row], folder: Path) -> Written:
        """Write figure and CSV of `rows` into `folder`; what is drawn there already is kept."""
        if not self.is_drawn(rows, folder):
            self.draw_files(rows, folder)
        return self.written(rows, folder)

    def is_drawn(self, rows: Sequence[Row], folder: Path) -> bool:
        """Tell whether the files in `folder` are those of these rows and of this code."""
        mark = self._mark(folder)
        files = self._files(folder) if rows else [folder / f"{self.name}.csv"]
        is_there = mark.is_file() and all(file.is_file() for file in files)
        return is_there and mark.read_text() == _digest(as_csv(self.row, rows))

    def draw_files(self, rows: Sequence[Row], folder: Path) -> None:
        """Write CSV and drawings; without rows there is no drawing, nor an old one."""
        csv, svg, png, narrow = self._files(folder)
        mark = self._mark(folder)
        mark.unlink(missing_ok=True)
        data = as_csv(self.row, rows)
        publish_bytes(csv, data)
        if rows:
            self.draw(rows, png)
            self.draw(rows, narrow, narrow=True)
        else:
            for old in (svg, png, narrow):
                old.unlink(missing_ok=True)
        publish_bytes(mark, _digest(data).encode())

    def written(self, rows: Sequence[Row], folder: Path) -> Written:
        """Return what `draw_files` left there, with what it shows in words."""
        if not rows:
            return Written(name=self.name, title=self.title, finding=self.missing)
        _, svg, _, narrow = self._files(folder)
        return Written(
            name=self.name,
            title=self.title,
            finding=self.finding(rows),
            svg=svg.read_text(),
            narrow_svg=narrow.read_text(),
        )

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Write the figure of each run named on the command line; return the exit code."""
        folders = sys.argv[1:] if argv is None else argv
        if not folders or folders[0].startswith("-"):
            print(f"usage: python -m analysis.{self.name} RUN…   ({self.title})")
            return 0 if "--help" in folders or "-h" in folders else 2
        for folder in folders:
            run = load_run(Path(folder))
            written = self.write(run)
            print(f"{run.report / self.name}.png .svg .csv: {written.finding}")
        return 0

    def _files(self, folder: Path) -> list[Path]:
        endings = (".csv", ".svg", ".png", "-narrow.svg")
        return [folder / f"{self.name}{ending}" for ending in endings]

    def _mark(self, folder: Path) -> Path:
        return folder / "cache" / "drawn" / self.name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data + code()).hexdigest()
