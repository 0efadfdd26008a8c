"""A figure from a run's files to PNG, SVG and CSV: what each figure module is to `report`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from analysis.run_files import Run, load_run
from analysis.table import write_csv

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
    table: Callable[[Run], Sequence[Row]]
    draw: Draw[Row]
    finding: Callable[[Sequence[Row]], str]
    """One sentence with the numbers that the figure shows."""
    missing: str
    """What to say when there is no row."""

    def write(self, run: Run) -> Written:
        """Write the figure and its CSV into the run's report folder."""
        rows = self.table(run)
        path = run.report / f"{self.name}.png"
        write_csv(rows, path.with_suffix(".csv"))
        if not rows:
            return Written(name=self.name, title=self.title, finding=self.missing)
        narrow = run.report / f"{self.name}-narrow.svg"
        self.draw(rows, path)
        self.draw(rows, narrow, narrow=True)
        return Written(
            name=self.name,
            title=self.title,
            finding=self.finding(rows),
            svg=path.with_suffix(".svg").read_text(),
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
