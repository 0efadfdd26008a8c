"""`agentrl train CONFIG [key=value …]`: begin a run on this machine and see it to its end.

The starting model is runs/NAME/sft/model where `agentrl sft` has made one, unless model.path is
given on the command line.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from launch.command import add_config, guard, parse, parser, say
from launch.run_dir import command_line, create, settled
from launch.supervise import supervise


def main(argv: Sequence[str]) -> int:
    """Create the run, or go on with the very same one, and train it."""
    arguments = parser("train", __doc__)
    add_config(arguments)
    given = parse(arguments, argv)
    config = starting_config(schema.load(given.config, given.overrides), given.overrides)
    check_model(config)
    line = command_line("train", argv)
    run = create(config, line)
    say(f"run {run.path}, starting model {run.config().model.path}")
    return supervise(run, line, began="started")


def starting_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the run's config with absolute paths and the model that training starts from."""
    config = settled(config)
    tuned = config.run_dir / "sft" / "model"
    if any(item.startswith("model.path=") for item in overrides) or not is_model(tuned):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tuned)))


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def check_model(config: RunConfig) -> None:
    """Raise ConfigError, with the command that mends it, if there is no model or no task."""
    folder = Path(config.model.path)
    if not is_model(folder):
        raise ConfigError(
            f"model.path={folder}: no model with config.json and tokenizer.json there; "
            "`agentrl prepare CONFIG` makes one if model.init=qwen3, else give its folder"
        )


if __name__ == "__main__":
    sys.exit(guard(main))
