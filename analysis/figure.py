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
    table: Callable[[Run], Sequence[Row]]
    draw: Draw[Row]
    finding: Callable[[Sequence[Row]], str]
    """A sentence or two with the numbers that the figure shows."""
    missing: str
    """What to say when there is no row."""

    def write(self, run: Run) -> Written:
        """Write the figure and its CSV into the run's report folder."""
        return self.write_rows(self.table(run), run.report)

    def is_drawn(self, run: Run) -> bool:
        """Tell whether `write` would find its drawing there."""
        rows, path = self.table(run), run.report / f"{self.name}.png"
        digest = _digest(as_csv(rows))
        return not rows or _is_drawn(_mark(run.report, self.name), digest, path)

    def write_rows(self, rows: Sequence[Row], folder: Path) -> Written:
        """Write figure and CSV of `rows` into `folder`; what is drawn there already is kept."""
        path = folder / f"{self.name}.png"
        mark = _mark(folder, self.name)
        data = as_csv(rows)
        if not rows:
            for old in (path, path.with_suffix(".svg"), folder / f"{self.name}-narrow.svg", mark):
                old.unlink(missing_ok=True)
            publish_bytes(path.with_suffix(".csv"), data)
            return Written(name=self.name, title=self.title, finding=self.missing)
        narrow = folder / f"{self.name}-narrow.svg"
        digest = _digest(data)
        if not _is_drawn(mark, digest, path):
            self.draw(rows, path)
            self.draw(rows, narrow, narrow=True)
            publish_bytes(path.with_suffix(".csv"), data)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(digest)
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


def _mark(folder: Path, name: str) -> Path:
    return folder / "cache" / "drawn" / name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data + code()).hexdigest()


def _is_drawn(mark: Path, digest: str, path: Path) -> bool:
    narrow = path.with_name(f"{path.stem}-narrow.svg")
    files = (path, path.with_suffix(".svg"), path.with_suffix(".csv"), narrow)
    return mark.is_file() and mark.read_text() == digest and all(file.is_file() for file in files)
