"""`agentrl report RUN…`: write the page, figures and numbers of runs, or of other stacks' logs."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from analysis import fresh
from analysis.window import Window
from launch.command import guard, parser, say


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path; with --json print the numbers instead."""
    arguments = parser("report", __doc__ or "")
    arguments.add_argument(
        "runs", metavar="RUN", nargs="+", help="run directory, such as runs/demo"
    )
    arguments.add_argument(
        "--compare", action="store_true", help="lead with a comparison of the two runs named"
    )
    arguments.add_argument(
        "--since", default="", metavar="TIME", help="2026-11-30T01:00, or 90m after the begin"
    )
    arguments.add_argument("--until", default="", metavar="TIME", help="likewise")
    arguments.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments.add_argument("--json", action="store_true", help="print the numbers as JSON")
    given = arguments.parse_args(argv)
    page, summary = _written([Path(run) for run in given.runs], given)
    say(summary.read_text().rstrip() if given.json else str(page))
    if given.open and not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found; open the page by hand")
    return 0


def _written(runs: Sequence[Path], given: argparse.Namespace) -> tuple[Path, Path]:
    """Return page and summary, made anew unless those that are there are of the same files."""
    asked = (given.since, given.until, "compare" if given.compare else "")
    report = runs[0] / "report"
    summary = report / ("summary.json" if len(runs) == 1 else "summaries.json")
    if fresh.is_fresh(runs, asked):
        return report / "index.html", summary
    from analysis.report import write_report

    window = Window(since=given.since, until=given.until) if given.since or given.until else None
    before = fresh.key(runs, asked)
    written = write_report(runs, window=window, is_compared=given.compare)
    fresh.set_mark(runs, asked, before)
    return written.page, written.summary


if __name__ == "__main__":
    sys.exit(guard(main))
