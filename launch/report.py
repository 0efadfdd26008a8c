"""`agentrl report RUN…`: write the page with plots of one run, or of several side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command import guard, parser, say


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path."""
    arguments = parser("report", __doc__)
    arguments.add_argument(
        "runs", metavar="RUN", nargs="+", help="run directory, such as runs/demo"
    )
    given = arguments.parse_args(argv)
    from analysis.report import write_report

    say(str(write_report([Path(run) for run in given.runs])))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
