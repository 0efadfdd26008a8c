"""`agentrl sweep [RUN…]`: remove sandboxes that no living process owns; default: all runs.

Scratch folders on this host are swept whatever run they are of, for their run may be gone.
"""

from __future__ import annotations

import sys
import tempfile
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
    removed += sweep_host(runs)
    say("\n".join([*removed, f"{len(removed)} sandboxes removed"]))
    return 0


def sweep_run(run: Path) -> list[str]:
    """Remove what the dead processes of a run and of its evaluations left on this host."""
    from agentrl.sandbox.lease import sweep

    folders = [run / "leases", *sorted(run.glob("evaluations/*/leases"))]
    return [line for folder in folders for line in sweep(folder)]


def sweep_host(runs: Sequence[Path]) -> list[str]:
    """Remove what dead processes left in the scratch folders: $TMPDIR and those of `runs`."""
    from agentrl.config_layers import read
    from agentrl.sandbox.lease import sweep_scratch

    configs = [run / "config.yaml" for run in runs]
    named = {read(path).get("sandbox", {}).get("scratch") for path in configs if path.exists()}
    folders = [Path(tempfile.gettempdir()), *sorted(Path(name) for name in named if name)]
    return [line for folder in folders for line in sweep_scratch(folder)]


if __name__ == "__main__":
    sys.exit(guard(main))
