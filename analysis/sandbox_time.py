"""Figure: medians and 99th percentiles of what sandboxes do, by backend.

A row is one phase in one backend: seconds of its single spans (queueing and start of each sandbox,
set-up, a command, a grading), not sums by trajectory. Quantiles are by nearest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl import events
from analysis import plot
from analysis.columns import numbers, texts
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.spans import Floats, owners_of

PHASES: dict[str, type[events.Event]] = {
    "set-up": events.Setup,
    "command": events.ToolCall,
    "grading": events.Grade,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One phase in one backend, seconds."""

    backend: str
    phase: str
    n: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: float


@remembered
def table(run: Run) -> list[Row]:
    owners = owners_of(run)
    starts = owners.spans(events.SandboxStart)
    codes, names = texts(starts.table, "backend")
    of_trajectory = np.full(owners.count + 1, -1, np.int64)  # the last one is of no trajectory
    of_trajectory[starts.owner] = codes
    of_trajectory[owners.count] = -1
    queued = numbers(starts.table, "queued_s")
    is_ok = numbers(starts.table, "ok") > 0
    rows: list[Row] = []
    for code, name in enumerate(names):
        mine = (codes == code) & is_ok
        rows += _row(name, "queueing", queued[mine])
        rows += _row(name, "start", (starts.seconds - queued)[mine])
        for phase, kind in PHASES.items():
            spans = owners.spans(kind)
            rows += _row(name, phase, spans.seconds[of_trajectory[spans.owner] == code])
    return rows


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    names = [f"{row.phase} (n = {row.n:,}): {row.backend}" for row in rows]
    row_in = plot.row_in(names, narrow=narrow, least=0.34)
    figure, (axes,) = plot.column([1.0 + row_in * len(rows)], narrow=narrow)
    places = list(range(len(rows)))
    for place, row in zip(places, rows, strict=True):
        axes.plot([row.median, row.p99], [place, place], color=plot.MUTED, linewidth=1.2)
    axes.plot([row.median for row in rows], places, "o", color=plot.NAVY, label="median")
    axes.plot([row.p99 for row in rows], places, "D", color=plot.ORANGE, label="99th percentile")
    for place, row in zip(places, rows, strict=True):
        axes.annotate(
            f"{plot.spoken(row.median)} · {plot.spoken(row.p99)}",
            (row.p99, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(places, plot.fitting(axes, names))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(row.p99 for row in rows) * 1.45 or 1)
    axes.set_xlabel("seconds")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    plot.save(figure, path, headline(rows), n=f"{_starts(rows):,} starts", png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    starts = [row for row in rows if row.phase == "start"]
    told = [
        f"{row.backend} {plot.spoken(row.median)} (99th percentile {plot.spoken(row.p99)})"
        for row in starts
    ]
    return f"Median sandbox start: {', '.join(told)}" if told else "No sandbox took time to start"


def finding(rows: Sequence[Row]) -> str:
    many = f"n = {_starts(rows):,} starts"
    return f"{headline(rows)}; {many}. Each mark is of single steps, not of sums."


def _starts(rows: Sequence[Row]) -> int:
    return sum(row.n for row in rows if row.phase == "start")


def _row(backend: str, phase: str, seconds: Floats) -> Iterator[Row]:
    if not len(seconds) or not np.any(seconds > 0):
        return
    ordered = np.sort(seconds)
    median, p90, p99 = (
        float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
        for share in (0.5, 0.9, 0.99)
    )
    yield Row(
        backend=backend,
        phase=phase,
        n=len(ordered),
        mean=float(ordered.mean()),
        median=median,
        p90=p90,
        p99=p99,
        longest=float(ordered[-1]),
    )


def side_by_side(runs: Mapping[str, Run]) -> list[Row]:
    """Return the rows of several runs, phase by phase, each backend with its run's name."""
    found = [
        replace(row, backend=f"{name}, {row.backend}")
        for name, run in runs.items()
        for row in table(run)
    ]
    order = ["queueing", "start", *PHASES]
    return sorted(found, key=lambda row: order.index(row.phase))


FIGURE = Figure(
    name="sandbox_time",
    title="What sandboxes cost, by backend",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No sandbox start was recorded.",
)
OF_RUNS = replace(FIGURE, name="sandbox_runs", title="Sandbox steps of these runs side by side")
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
