"""`agentrl train CONFIG [key=value …]`: begin a run, here or as a job on a cluster (cluster=NAME).

On this machine the command sees the run to its end; on a cluster it ends with the job's id.
--dry-run prints the very script that would be queued, and leaves everything as it is.
The starting model is runs/NAME/sft/model where `agentrl sft` has made it from this very
model.path, else model.path itself.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, TaskError
from launch import cluster_run, image_run, submission
from launch.command import add_config, guard, parse, parser, say
from launch.plan import check_caps
from launch.run_dir import RunDir, command_line, create, settled
from slurm.exit_record import DONE


def main(argv: Sequence[str]) -> int:
    """Create the run, or go on with the very same one, and train it."""
    arguments = parser("train", __doc__)
    arguments.add_argument("--dry-run", action="store_true", help="print the batch script and end")
    arguments.add_argument("--wait", action="store_true", help="on a cluster: watch it to its end")
    add_config(arguments)
    given = parse(arguments, argv)
    config = starting_config(schema.load(given.config, given.overrides))
    if given.dry_run:
        return cluster_run.show(config)
    check_model(config)
    check_trainer(config)
    check_tasks(config)
    check_caps(config)
    line = command_line("train", argv)
    image = image_run.checked(config, RunDir(config.run_dir))
    run = create(config, line, image=image_run.facts(image))
    image_run.record(run, image)
    say(f"run {run.path}, starting model {run.config().model.path}")
    if config.cluster.is_slurm:
        cluster_run.launch(run, line, began="started")
        if not given.wait:
            return DONE
        from launch import watch  # it brings the report's reader

        return watch.until_end(run)
    from launch.supervise import supervise

    submission.refuse_if_living(run)
    return supervise(run, line, began="started")


def starting_config(config: RunConfig) -> RunConfig:
    """Return the run's config with absolute paths and the model that training starts from.

    That is the run's fine-tuned model where `agentrl sft` made it from this very model.path.
    """
    config = settled(config)
    sft = config.run_dir / "sft"
    if not is_model(sft / "model") or not (sft / "config.yaml").is_file():
        return config
    if schema.load(sft / "config.yaml").model.path != config.model.path:
        return config
    tuned = dataclasses.replace(config.model, path=str(sft / "model"))
    return dataclasses.replace(config, model=tuned)


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def check_model(config: RunConfig) -> None:
    """Raise ConfigError, with the command that mends it, if there is no model."""
    folder = Path(config.model.path)
    if not is_model(folder):
        raise ConfigError(
            f"model.path={folder}: no model with config.json and tokenizer.json there; "
            "`agentrl prepare CONFIG` makes one if model.init=qwen3, else give its folder"
        )


def check_trainer(config: RunConfig) -> None:
    """Raise ConfigError for a trainer that could not start, before a job waits in vain."""
    from agentrl.model_fit import check_fit, require_megatron  # they bring numpy

    check_fit(config)
    if config.training.backend == "megatron" and not config.image:  # else it is in the image
        require_megatron(config.training)


def check_tasks(config: RunConfig) -> None:
    """Read the tasks before any role does. Raises TaskError where there are none to train on.

    A site's own roles (AGENTRL_ROLES) know what they need.
    """
    from agentrl.tasks.load import load_split

    own = image_run.roles_of(config) == image_run.ROLES
    if own and not load_split(config.tasks, "train"):
        raise TaskError(f"tasks.folder={config.tasks.folder}: its split `train` is empty")


if __name__ == "__main__":
    sys.exit(guard(main))
