"""Some figures of a run, drawn by a process of its own while `report` draws the others.

python -m analysis.drawing RUN SINCE UNTIL FIGURE…      (either time may be empty)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import RecordError
from analysis.figure import Figure, Written
from analysis.run_files import Run, load_run
from analysis.window import Window

HEAVY = ("solve_groups", "training_curves", "cap_replay", "trajectory_time", "what_now", "faults")
"""About half of the drawing; the rest is done by the report's own process meanwhile."""


@contextmanager
def helper(run: Run, window: Window | None, names: Sequence[str]) -> Iterator[None]:
    """Have another process draw the figures of `names`; the block ends when it has.

    Raises RecordError in that process's words. With one core, nothing is started: they are drawn
    when the report comes to them.
    """
    if len(os.sched_getaffinity(0)) < 2 or not names:
        yield
        return
    ends = (window.since, window.until) if window else ("", "")
    command = [sys.executable, "-m", "analysis.drawing", str(run.folder), *ends, *names]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield
        _, said = process.communicate()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RecordError(
            f"drawing {', '.join(names)} exited {process.returncode}: "
            f"{said.decode(errors='replace')[-2000:]}"
        )


def draw_all(run: Run, window: Window | None, figures: Sequence[Figure[Any]]) -> list[Written]:
    """Write every figure of `run`, in their order, with a second process where one helps."""
    missing = [each for each in figures if not each.is_drawn(run)]
    others = [each.name for each in missing if each.name in HEAVY]
    if len(others) == len(missing) or len(missing) < 4:
        others = []
    with helper(run, window, others):
        first = {each.name: each.write(run) for each in figures if each.name not in others}
    return [first.get(each.name) or each.write(run) for each in figures]


def main(argv: Sequence[str]) -> int:
    from analysis.report import FIGURES

    folder, since, until, *names = argv
    window = Window(since=since, until=until) if since or until else None
    run = load_run(Path(folder), window=window)
    for figure in FIGURES:
        if figure.name in names:
            figure.write(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
