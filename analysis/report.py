"""`report`: runs to one self-contained page and a folder of figures with their data."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.errors import RecordError
from agentrl.handoff.publish import publish_bytes
from analysis import (
    faults,
    sft_loss,
    solve_rate,
    step_time,
    throughput,
    training_curves,
    trajectory_time,
)
from analysis.figure import Written
from analysis.page import render, section
from analysis.run_files import Run, load_run

log = logging.getLogger(__name__)


def write_report(run_dirs: list[Path]) -> Path:
    """Write each run's figures and one page on all of them; return the page's path.

    The page is in the first run's report folder. Raises RecordError when a run isn't there.
    """
    if not run_dirs:
        raise RecordError("report on no run; name a run directory, as in runs/demo")
    runs = [load_run(folder) for folder in run_dirs]
    page = render([section(run, draw_all(run)) for run in runs])
    path = runs[0].report / "index.html"
    publish_bytes(path, page.encode())
    log.info("wrote %s", path)
    return path


def draw_all(run: Run) -> list[Written]:
    """Write every figure of `run`, in the order of the page."""
    return [
        solve_rate.FIGURE.write(run),
        sft_loss.FIGURE.write(run),
        training_curves.FIGURE.write(run),
        step_time.FIGURE.write(run),
        trajectory_time.FIGURE.write(run),
        throughput.FIGURE.write(run),
        faults.FIGURE.write(run),
    ]
