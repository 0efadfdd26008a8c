"""`agentrl resume RUN [key=value …]`: go on with a run from its newest verified checkpoint.

What it uses is what its own directory says; only training.steps and timeouts can be changed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from omegaconf import OmegaConf

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from launch.command import add_overrides, guard, parse, parser, say
from launch.run_dir import RunDir, command_line, settled
from launch.supervise import supervise
from slurm import ledger


def main(argv: Sequence[str]) -> int:
    """Go on with the run unless it is done."""
    arguments = parser("resume", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    add_overrides(arguments)
    given = parse(arguments, argv)
    run = RunDir.open(given.run)
    if given.overrides:
        run.write_config(changed(run.config(), given.overrides))
    history = ledger.read(run.path)
    if not given.overrides and history and history[-1].action == "done":
        say(f"{run.name} is done at step {run.checkpoint_step()}; training.steps=N goes further")
        return 0
    say(f"run {run.path}, from step {run.checkpoint_step()}")
    return supervise(run, command_line("resume", argv), began="resumed")


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Lay `overrides` over what the run uses. Raises ConfigError for any other key."""
    for item in overrides:
        key = item.partition("=")[0]
        if not may_change(key):
            raise ConfigError(
                f"{key}: a resumed run keeps it; only training.steps, grace_s and timeouts and "
                "…timeout_s can be changed. Another value needs a run of another name"
            )
    chosen = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(overrides)))
    plain = OmegaConf.create(OmegaConf.to_container(chosen))
    if not isinstance(plain, type(OmegaConf.create({}))):
        raise ConfigError(f"overrides {overrides}: make no mapping")
    return settled(dataclasses.replace(schema.resolve(plain, "resume")))


def may_change(key: str) -> bool:
    return key == "training.steps" or key == "grace_s" or key.endswith("timeout_s")


if __name__ == "__main__":
    sys.exit(guard(main))
