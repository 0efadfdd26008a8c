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
    runs = [Path(run) for run in given.runs] or sorted(Path("runs").glob("*/"))
    removed = [line for run in runs for line in sweep_run(run)]
    say("\n".join([*removed, f"{len(removed)} sandboxes removed"]))
    return 0


def sweep_run(run: Path) -> list[str]:
    """Remove what the dead processes of a run and of its evaluations left on this host."""
    from agentrl.sandbox.lease import sweep

    folders = [run / "leases", *sorted(run.glob("evaluations/*/leases"))]
    return [line for folder in folders for line in sweep(folder)]


if __name__ == "__main__":
    sys.exit(guard(main))
