"""`agentrl validate CONFIG [--split SPLIT] [--repeats N] [key=value …]`: which tasks can decide.

Each task is graded in a sandbox as it is, where its tests must fail, and with its own fix, where
they must pass; N times each, where they must say the same. FOLDER/SPLIT.faults.json names the tasks
that do not, and why; every command leaves those out from then on. Delete it to have them back.
Without --split it is train and the split that evaluation reads, and no instance may be in both.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import TaskError
from agentrl.handoff.publish import publish_json
from launch.command import add_config, guard, parse, parser, say
from launch.progress import Bar
from slurm.exit_record import DONE, FAILED

SHOWN = 20


def main(argv: Sequence[str]) -> int:
    """Validate one split, or both; 1 when no task of one can decide."""
    arguments = parser("validate", __doc__)
    arguments.add_argument("--split", help="the one to validate")
    arguments.add_argument("--repeats", type=int, default=2, metavar="N", help="default: 2")
    add_config(arguments)
    given = parse(arguments, argv)
    config = schema.load(given.config, given.overrides)
    splits = [given.split] if given.split else ["train", config.evaluation.split]
    left = [validate_split(config, split, max(1, given.repeats)) for split in splits]
    if len(splits) > 1:
        check_leaks(config, *splits)
    return DONE if all(left) else FAILED


def validate_split(config: RunConfig, split: str, repeats: int) -> int:
    """Validate every task of a split, and publish the faults; return how many are good."""
    from agentrl.tasks.load import faults_file, load_split
    from agentrl.tasks.validate import validate_each

    tasks = load_split(config.tasks, split, with_faults=True)
    done = 0
    with Bar(f"validating {split}", len(tasks)) as bar:

        def told() -> None:
            nonlocal done
            done += 1
            bar.update(done)

        faults = asyncio.run(validate_each(config, tasks, told, repeats=repeats))
    publish_json(faults_file(config.tasks, split), faults)
    for fault in list(faults.values())[:SHOWN]:
        say(f"  {fault}")
    more = f", {SHOWN} of them above" if len(faults) > SHOWN else ""
    say(
        f"{split}: {len(tasks) - len(faults)} of {len(tasks)} tasks can decide; the {len(faults)} "
        f"others{more} are left out, and named in {faults_file(config.tasks, split)}"
    )
    return len(tasks) - len(faults)


def check_leaks(config: RunConfig, trained: str, evaluated: str) -> None:
    """Say which repositories two splits share. Raises TaskError for a shared instance."""
    from agentrl.tasks.load import load_split
    from agentrl.tasks.sample import leaked

    instances, repositories = leaked(
        load_split(config.tasks, trained), load_split(config.tasks, evaluated)
    )
    if instances:
        raise TaskError(
            f"{len(instances)} tasks of {evaluated} are in {trained} too, as {instances[0]}: what "
            f"is measured there was trained on; drop them from {trained}"
        )
    if repositories:
        say(
            f"{trained} and {evaluated} share {len(repositories)} repositories, as "
            f"{', '.join(repositories[:3])}: {evaluated} does not tell how unseen code is mended"
        )


if __name__ == "__main__":
    sys.exit(guard(main))
