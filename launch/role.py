"""One role of a launch attempt on one node: `python -m launch.role ROLE RUN ATTEMPT NODE`.

The batch script starts it by srun, with slurm.task.MARK in its environment. Sandboxes that an
earlier process left on this node are removed before and after. AGENTRL_ROLES names another module
with `trainer_role` and `inference_role`, such as a site's own trainer; it is launch.roles if unset.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from launch.command import guard, parser
from launch.network import environment_of
from launch.run_dir import RunDir
from launch.sweep import sweep_run
from slurm.task import keep

HELD = (signal.SIGUSR2, signal.SIGTERM)
"""Not delivered before the role listens (launch.signals). USR2 never, for where Slurm sends it to
every process of a step it would kill the engines; the keeper hands it on as TERM."""


def main(argv: Sequence[str]) -> int:
    """Play the role to its end; return its exit code."""
    arguments = parser("role", __doc__)
    arguments.add_argument("role", choices=["trainer", "inference"])
    arguments.add_argument("run")
    arguments.add_argument("attempt", type=int)
    arguments.add_argument("node", type=int)
    given = arguments.parse_args(argv)
    run = RunDir.open(given.run)

    def play(_: Sequence[str]) -> int:
        roles = importlib.import_module(os.environ.get("AGENTRL_ROLES", "launch.roles"))
        if given.role == "trainer":
            return int(roles.trainer_role(str(run.path), given.attempt))
        return int(roles.inference_role(str(run.path), given.attempt, given.node))

    host = os.environ.get("SLURMD_NODENAME", "")
    os.environ.update(environment_of(run.attempt(given.attempt), host))
    sweep_run(run.path)
    grace_s = run.config().grace_s
    code = keep(lambda: guard(play, ()), launcher=os.getppid(), grace_s=grace_s, held=HELD)
    sweep_run(run.path)
    return code


if __name__ == "__main__":
    sys.exit(guard(main))
