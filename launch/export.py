"""`agentrl export SPOOL OUT [--form mini|atif] [--model NAME]`: trajectories as files, one each.

SPOOL is a run's or an evaluation's folder `spool`. `mini` is mini-swe-agent's trajectory format,
`atif` is Harbor's interchange form, with tokens and log-probabilities.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.errors import RecordError
from agentrl.handoff.publish import publish_bytes
from agentrl.handoff.spool import list_spool, read_group
from agentrl.handoff.trajectory import Trajectory
from agentrl.tasks.atif import to_atif
from launch.command import guard, parser, say
from slurm.exit_record import DONE


def main(argv: Sequence[str]) -> int:
    """Write every trajectory of a spool."""
    arguments = parser("export", __doc__)
    arguments.add_argument("spool", metavar="SPOOL", type=Path)
    arguments.add_argument("out", metavar="OUT", type=Path)
    arguments.add_argument("--form", choices=FORMS, default="mini", help="default: mini")
    arguments.add_argument("--model", default="policy", help="its name in ATIF")
    given = arguments.parse_args(argv)
    files = list_spool(given.spool)
    if not files:
        raise RecordError(f"{given.spool}: no groups there; give a folder `spool` of a run")
    count = 0
    for draw in sorted(files):
        for trajectory in read_group(files[draw]).trajectories:
            path = given.out / f"{_plain(trajectory.task_id)}-{draw}-{trajectory.attempt}.traj.json"
            publish_bytes(path, FORMS[given.form](trajectory, given.model))
            count += 1
    say(f"{count} trajectories in {given.out}")
    return DONE


def _mini(trajectory: Trajectory, model: str) -> bytes:
    del model
    return trajectory.messages.encode()


def _atif(trajectory: Trajectory, model: str) -> bytes:
    return json.dumps(to_atif(trajectory, model=model)).encode()


FORMS: dict[str, Callable[[Trajectory, str], bytes]] = {"mini": _mini, "atif": _atif}


def _plain(task_id: str) -> str:
    return re.sub(r"[^\w.\-]", "_", task_id)


if __name__ == "__main__":
    sys.exit(guard(main))
