"""`agentrl resume RUN [key=value …]`: go on with a run from its newest verified checkpoint.

What it uses is what its own directory says; only training.steps, timeouts, the cluster and, with
--accept-image-change, the image can be changed. On a cluster it queues another job, unless one is
queued or runs already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.config_layers import laid_over
from agentrl.errors import ConfigError
from launch import cluster_run, image_run, submission
from launch.command import add_overrides, guard, parse, parser, say
from launch.run_dir import RunDir, command_line, settled
from slurm import ledger
from slurm.exit_record import DONE


def main(argv: Sequence[str]) -> int:
    """Go on with the run unless it is done."""
    arguments = parser("resume", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    arguments.add_argument("--wait", action="store_true", help="on a cluster: watch it to its end")
    arguments.add_argument(
        "--accept-image-change",
        action="store_true",
        help="go on in another image than the run began in: other software, other numbers",
    )
    add_overrides(arguments)
    given = parse(arguments, argv)
    run = RunDir.open(given.run)
    submission.refuse_if_living(run)
    config = changed(run.config(), given.overrides) if given.overrides else run.config()
    image = image_run.checked(config, run)
    image_run.record(run, image, accept_change=given.accept_image_change)
    if given.overrides:
        run.write_config(config)
    history = ledger.read(run.path)
    if not given.overrides and history and history[-1].action == "done":
        say(f"{run.name} is done at step {run.checkpoint_step()}; training.steps=N goes further")
        return 0
    say(f"run {run.path}, from step {run.checkpoint_step()}")
    if run.config().cluster.is_slurm:
        cluster_run.launch(run, command_line("resume", argv), began="resumed")
        if not given.wait:
            return DONE
        from launch import watch  # it brings the report's reader

        return watch.until_end(run)
    from launch.supervise import supervise

    return supervise(run, command_line("resume", argv), began="resumed")


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Lay `overrides` over what the run uses. Raises ConfigError for any other key."""
    for item in overrides:
        key = item.partition("=")[0]
        if not may_change(key):
            raise ConfigError(
                f"{key}: a resumed run keeps it; only training.steps, grace_s, "
                "image, …timeout_s and cluster can be changed. Another value needs a run of "
                "another name"
            )
    plain = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config)))
    if not isinstance(plain, DictConfig):
        raise ConfigError(f"overrides {overrides}: make no mapping")
    return settled(schema.resolve(laid_over(plain, overrides), "resume"))


def may_change(key: str) -> bool:
    is_where = key == "cluster" or key.startswith("cluster.")
    return is_where or key in ("training.steps", "grace_s", "image") or key.endswith("timeout_s")


if __name__ == "__main__":
    sys.exit(guard(main))
