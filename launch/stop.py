"""`agentrl stop RUN`: ask a run to save and end, and wait until it has."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from agentrl.errors import WaitTimeout
from agentrl.handoff.publish import publish_bytes
from launch.command import guard, parser, say
from launch.run_dir import RunDir, is_living, launcher_of

POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Write the run's stop file; its roles poll it. Raises WaitTimeout past the deadline."""
    arguments = parser("stop", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    arguments.add_argument("--deadline-s", type=float, help="longest wait (default: grace_s + 30)")
    given = arguments.parse_args(argv)
    run = RunDir.open(given.run)
    attempts = run.attempts()
    if not attempts or not is_living(launcher := launcher_of(run, attempts[-1])):
        say(f"{run.name}: nothing of it runs on this machine")
        return 0
    publish_bytes(run.stop_file, b"")
    wait_s = run.config().grace_s + 30 if given.deadline_s is None else given.deadline_s
    deadline = time.monotonic() + wait_s
    while is_living(launcher):
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"run {run.path}: its launcher (pid {launcher['pid']}) still runs after "
                f"{wait_s:g} s; a second Ctrl-C there, or `kill` of that pid, ends it"
            )
        time.sleep(POLL_S)
    say(f"{run.name}: ended at step {run.checkpoint_step()}")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
