"""`agentrl plan CONFIG [key=value …]`: every cap on trajectories at once, the smallest first.

Each is of one inference node, with its source and what raises it. With cluster=local this machine
is that node and is probed; for a Slurm cluster the config's own caps are told, as a login node's
limits are not those of its compute nodes: run it there (`srun … agentrl plan CONFIG --here`).
Below the caps stands what each GPU of the trainer holds of the model.
Exit code 1 when something would fail before the wanted number is reached, or the model is too large
for the trainer's GPUs. --prove holds the real number of files, processes, connections and sandboxes
on this machine for a moment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.caps import UNBOUNDED, Cap, find_caps, shortages, wanted
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from launch.command import add_config, guard, parse, parser, say
from slurm.exit_record import DONE, FAILED

SHOWN_AT_START = 4
PULLS_PER_HOUR = 100
"""Met by others on one address; Docker Hub changes what it gives."""


def main(argv: Sequence[str]) -> int:
    """Print the table of all caps."""
    arguments = parser("plan", __doc__)
    arguments.add_argument("--here", action="store_true", help="this machine is an inference node")
    arguments.add_argument("--prove", action="store_true", help="hold the real number here")
    add_config(arguments)
    given = parse(arguments, argv)
    config = schema.load(given.config, given.overrides)
    caps = caps_of(config, is_here=given.here or not config.cluster.is_slurm)
    held, over = trainer(config)
    told = [*lines(caps, wanted(config)), verdict(caps, wanted(config)), *pulls(config), held, over]
    say("\n".join(filter(None, told)))
    is_proved = prove(config) if given.prove else True
    return DONE if is_proved and not over and not shortages(caps, wanted(config)) else FAILED


def caps_of(config: RunConfig, *, is_here: bool) -> list[Cap]:
    """Return the caps of a run; is_here: this machine is one of its inference nodes."""
    from agentrl.caps_host import model_shape, probe

    host = probe(config) if is_here else None
    return find_caps(config, host=host, model=model_shape(Path(config.model.path)))


def pulls(config: RunConfig) -> list[str]:
    """Return a line on the images that tasks name themselves: each is pulled once."""
    if not config.tasks.environment or config.tasks.source == "repair":
        return []
    from agentrl.tasks.load import load_split

    images = {task.image_name for task in load_split(config.tasks, "train")}
    return [
        f"{len(images)} images are pulled, each once: {len(images) / PULLS_PER_HOUR:.2f} h at the "
        f"{PULLS_PER_HOUR} an hour that Docker Hub may give one address; a mirror or login has more"
    ]


def trainer(config: RunConfig) -> tuple[str, str]:
    """Return what the trainer's GPUs hold of the model, once there is one, and why they cannot."""
    from agentrl import model_fit  # it brings numpy

    is_made = (Path(config.model.path) / "config.json").is_file()
    memory = model_fit.trainer_memory(config) if is_made else None
    return model_fit.memory_line(config, memory), model_fit.over_memory(config, memory)


def prove(config: RunConfig) -> bool:
    """Hold the real numbers on this machine, tell of each, and return whether all were reached."""
    from agentrl.caps_proof import prove as held

    found = held(config)
    for one in found:
        end = f": {one.error}" if one.error else ""
        say(f"held {one.held:,} of {one.wanted:,} {one.what} at once, {one.seconds:.1f} s{end}")
    return all(one.is_enough for one in found)


def check_caps(config: RunConfig) -> None:
    """Tell the smallest caps before a run starts. Raises ConfigError where one would be passed."""
    caps, number = caps_of(config, is_here=not config.cluster.is_slurm), wanted(config)
    if short := shortages(caps, number):
        raise ConfigError(
            f"{number} trajectories at once, but {short[0].name} allow {short[0].at_once} "
            f"({short[0].source}): {short[0].fix}, or lower rollout.concurrency; "
            "`agentrl plan` tells all caps"
        )
    say("\n".join([verdict(caps, number), *lines(caps[:SHOWN_AT_START], number)]))


def verdict(caps: Sequence[Cap], number: int) -> str:
    """Return in one line what bounds the run, for a person."""
    low = [cap for cap in caps if cap.at_once < number and cap.past != "may fail"]
    if not low:
        return f"{number} trajectories at once on a node; no cap is below that"
    failing = next((cap for cap in low if cap.past == "fails"), None)
    end = f". Past {failing.at_once:,}, {failing.name} run out" if failing else ""
    return (
        f"{number} trajectories at once on a node are wanted; the smallest cap is {low[0].name}, "
        f"at {low[0].at_once:,}: {low[0].fix}{end}"
    )


def lines(caps: Sequence[Cap], number: int) -> list[str]:
    """Lay the caps out, one a line; those below `number`, and the next one, with their fix."""
    width = max(len(cap.name) for cap in caps)
    made = [f"{'at once':>9}  {'cap':<{width}}  past it"]
    told = 0
    for cap in caps:
        share = f"{_share(cap.per)} of {_count(cap.allowed)} {cap.unit} each"
        made.append(
            f"{_count(cap.at_once):>9}  {cap.name:<{width}}  {cap.past:<8}  {share}: {cap.source}"
        )
        if cap.at_once < number or told == 0:
            made.append(f"{'':>9}  {'':<{width}}  {'':<8}  fix: {cap.fix}")
        told += cap.at_once >= number
    return made


def _share(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{round(number):,}"


def _count(number: float) -> str:
    return "no limit" if number >= UNBOUNDED / 1024 else f"{int(number):,}"


if __name__ == "__main__":
    sys.exit(guard(main))
