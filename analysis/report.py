"""`report`: runs to one self-contained page, a JSON summary and a folder of figures with data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import RecordError
from agentrl.handoff.publish import publish_bytes
from analysis import (
    cap_replay,
    compare,
    faults,
    gpu_hours,
    long_tail,
    sandbox_time,
    sft_loss,
    solve_groups,
    solve_rate,
    step_time,
    throughput,
    trace,
    training_curves,
    trajectory_time,
    what_now,
)
from analysis.drawing import draw_all
from analysis.figure import Figure, Written
from analysis.page import Compared, Table, drawing, render, section
from analysis.run_files import Run, load_run
from analysis.summary import Json, numbers
from analysis.window import Window

log = logging.getLogger(__name__)
FIGURES: tuple[Figure[Any], ...] = (
    what_now.FIGURE,
    solve_rate.FIGURE,
    solve_groups.FIGURE,
    sft_loss.FIGURE,
    training_curves.FIGURE,
    step_time.FIGURE,
    long_tail.FIGURE,
    cap_replay.FIGURE,
    trajectory_time.FIGURE,
    sandbox_time.FIGURE,
    throughput.FIGURE,
    faults.FIGURE,
    gpu_hours.FIGURE,
)
"""In the order of the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was written."""

    page: Path
    summary: Path


def write_report(
    run_dirs: Sequence[Path], *, window: Window | None = None, is_compared: bool = False
) -> Report:
    """Write each run's figures and one page on all of them, in the first run's report folder.

    Raises RecordError when a run isn't there, or two are to be compared and there are not two.
    """
    if not run_dirs:
        raise RecordError("report on no run; name a run directory, as in runs/demo")
    if is_compared and len(run_dirs) != 2:
        raise RecordError(f"compare {len(run_dirs)} runs: --compare takes two run directories")
    runs = [load_run(folder, window=window) for folder in run_dirs]
    sections = []
    for run in runs:
        figures = draw_all(run, window, FIGURES)
        traced = trace.write_trace(trace.chosen(run), run.report / "trace.json")
        sections.append(section(run, figures, traced))
        publish_bytes(run.report / "summary.json", _json(numbers(run)))
    first = runs[0].report
    compared = _compared(runs[0], runs[1]) if is_compared else None
    publish_bytes(first / "index.html", render(sections, compared).encode())
    summary = first / "summary.json"
    if len(runs) > 1:
        summary = first / "summaries.json"
        publish_bytes(summary, _json({run.name: numbers(run) for run in runs}))
    log.info("wrote %s", first / "index.html")
    return Report(page=first / "index.html", summary=summary)


def _compared(first: Run, second: Run) -> Compared:
    rows = compare.table(first, second)
    written: Written = compare.FIGURE.write_rows(rows, first.report)
    table = Table(
        title="Before and after",
        columns=("measure", "unit", first.name, second.name, "change [95 %]", "n"),
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
        note="" if rows else compare.FIGURE.missing,
    )
    return Compared(
        title=f"{first.name} against {second.name}", table=table, drawing=drawing(written)
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _json(found: Json) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_finite(found)), indent=1) + b"\n"


def _finite(value: object) -> object:
    """Replace numbers that JSON has no word for by null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
