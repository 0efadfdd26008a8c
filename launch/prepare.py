"""`agentrl prepare CONFIG [key=value …]`: make the tasks, and the model if it is to be made."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl import config as schema
from launch.command import add_config, guard, parse, parser


def main(argv: Sequence[str]) -> int:
    """Make what is missing; what is there is left."""
    arguments = parser("prepare", __doc__)
    add_config(arguments)
    given = parse(arguments, argv)
    config = schema.load(given.config, given.overrides)
    from agentrl.tasks.prepare import prepare

    prepare(config)
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
