"""`report`: runs to one self-contained page, a JSON summary and a folder of figures with data."""

from __future__ import annotations

import logging
from collections import deque
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
    perfetto,
    sandbox_time,
    several,
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
from analysis.drawing import Job, draw_all
from analysis.figure import Figure
from analysis.page import render, section, top
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
    trace.FIGURE,
)
"""In the order of the page."""
ALL_FIGURES: tuple[Figure[Any], ...] = (*FIGURES, compare.FIGURE, sandbox_time.OF_RUNS)


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
    names = several.labels(run_dirs)
    runs = dict(zip(names, [load_run(folder, window=window) for folder in run_dirs], strict=True))
    above = several.jobs(runs, is_compared=is_compared)
    drawn = draw_all([*above, *(job for run in runs.values() for job in _jobs(run))])
    rest = deque(drawn[len(above) :])
    sections = []
    for name, run in runs.items():
        traced = perfetto.write_trace(trace.window(run), run.report / "trace.json")
        figures = [rest.popleft() for _ in FIGURES]
        sections.append(section(run, figures, name=name, traced=traced))
        publish_bytes(run.report / "summary.json", _json(numbers(run)))
    first = run_dirs[0] / "report"
    tops = [top(each, several.table(job, names)) for each, job in zip(drawn, above, strict=False)]
    publish_bytes(first / "index.html", render(sections, tops).encode())
    summary = first / "summary.json"
    if len(runs) > 1:
        summary = first / "summaries.json"
        publish_bytes(summary, _json({name: numbers(run) for name, run in runs.items()}))
    log.info("wrote %s", first / "index.html")
    return Report(page=first / "index.html", summary=summary)


def _jobs(run: Run) -> list[Job]:
    return [Job(figure=each, rows=each.table(run), folder=run.report) for each in FIGURES]


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
