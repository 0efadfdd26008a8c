"""What a page on several runs begins with: their names, a comparison, sandboxes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import RecordError
from analysis import compare, sandbox_time
from analysis.drawing import Job
from analysis.page import Table
from analysis.run_files import Run


def labels(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder's, with as many folders above as tell it apart."""
    parts = [folder.resolve().parts for folder in folders]
    for many in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-many:]).replace("//", "/") for part in parts]
        if len(set(found)) == len(found):
            return found
    raise RecordError(f"report on {', '.join(map(str, folders))}: one run is named twice")


def jobs(runs: Mapping[str, Run], *, is_compared: bool) -> list[Job]:
    """Return the figures of all runs together, which stand in the first one's folder."""
    if len(runs) < 2:
        return []
    first, second, *_ = runs.values()
    rows = sandbox_time.side_by_side(runs)
    found = [Job(figure=sandbox_time.OF_RUNS, rows=rows, folder=first.report)]
    if is_compared:
        compared = compare.table(first, second)
        found.insert(0, Job(figure=compare.FIGURE, rows=compared, folder=first.report))
    return found


def table(job: Job, names: Sequence[str]) -> Table:
    """Return the numbers of one of `jobs` for the page."""
    return _compared(job.rows, names) if job.figure is compare.FIGURE else _sandboxes(job.rows)


def _compared(rows: Sequence[Any], names: Sequence[str]) -> Table:
    return Table(
        title="Before and after",
        columns=("measure", "unit", *names, "change [95 %]", "n"),
        rows=tuple(
            (
                row.measure,
                row.unit,
                _number(row.first),
                _number(row.second),
                row.spoken_difference,
                f"{row.first_n:,} / {row.second_n:,}",
            )
            for row in rows
        ),
    )


def _sandboxes(rows: Sequence[Any]) -> Table:
    return Table(
        title="Sandbox steps",
        columns=("step", "run, backend", "n", "median, s", "99th percentile, s"),
        rows=tuple(
            (row.phase, row.backend, f"{row.n:,}", f"{row.median:.3g}", f"{row.p99:.3g}")
            for row in rows
        ),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
