"""`agentrl sweep [RUN…]`: remove sandboxes that no living process owns; default: all runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command import guard, parser, say


def main(argv: Sequence[str]) -> int:
    """Print a line for each sandbox removed."""
    arguments = parser("sweep", __doc__)
    arguments.add_argument("runs", metavar="RUN", nargs="*", help="run directory")
    given = arguments.parse_args(argv)
    runs = [Path(run) for run in given.runs] or sorted(
        path.parent for path in Path("runs").glob("*/leases")
    )
    removed = [line for run in runs for line in sweep_run(run)]
    say("\n".join([*removed, f"{len(removed)} sandboxes removed"]))
    return 0


def sweep_run(run: Path) -> list[str]:
    """Remove what a run's dead processes left on this host."""
    from agentrl.sandbox.lease import sweep

    return sweep(run / "leases")


if __name__ == "__main__":
    sys.exit(guard(main))
