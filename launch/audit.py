"""`agentrl audit RUN`: prove from a run's files that every draw is accounted for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.command import guard, parser, say
from launch.run_dir import RunDir
from slurm.exit_record import DONE, FAILED


def main(argv: Sequence[str]) -> int:
    """Print what was found; exit 1 if anything is wrong."""
    arguments = parser("audit", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    given = arguments.parse_args(argv)
    from agentrl.audit import audit

    found = audit(RunDir.open(given.run).path)
    say("\n".join(found.lines))
    return DONE if found.ok else FAILED


if __name__ == "__main__":
    sys.exit(guard(main))
