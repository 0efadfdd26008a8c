"""`agentrl evaluate CONFIG [--model PATH] [--out NAME] [key=value …]`: pass@k of a model.

The model is, unless given, the run's newest version, else its fine-tuned model, else model.path.
Written is runs/NAME/evaluations/OUT/: summary.json, preds.json (mini-swe-agent's), every attempt.
The same command goes on after Ctrl-C (exit code 75).
"""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.events import EventWriter
from agentrl.handoff.publish import publish_bytes
from agentrl.handoff.spool import list_spool
from launch.command import add_config, guard, parse, parser, say
from launch.errand import Answer, errand, submit, watch
from launch.progress import Bar, EventTail, Standing
from launch.run_dir import settled
from launch.signals import StopFlag
from launch.train import check_model, is_model
from slurm.exit_record import DONE, SAVED


def main(argv: Sequence[str]) -> int:
    """Evaluate one model on one split at one temperature."""
    arguments = parser("evaluate", __doc__)
    add_config(arguments)
    arguments.add_argument("--model", type=Path, help="folder in Hugging Face's layout")
    arguments.add_argument("--out", help="name of the result (default: MODEL-SPLIT-TTEMPERATURE)")
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    check_model(config)
    kind, model = ("model", given.model.absolute()) if given.model else newest_model(config)
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: no config.json there; give a model's folder")
    chosen = config.evaluation
    out = (
        config.run_dir
        / "evaluations"
        / (given.out or f"{kind}-{chosen.split}-T{chosen.temperature}")
    )
    publish_bytes(out / "config.yaml", schema.to_yaml(config).encode())
    code = run(config, model, out)
    if code == SAVED:
        say(f"saved; the same command goes on:\n$ agentrl evaluate {shlex.join(argv)}")
    elif code == DONE:
        say(f"{out.name}: {told(out)}")
    return code


def newest_model(config: RunConfig) -> tuple[str, Path]:
    """Return (`rl`, `sft` or `base`, folder) of the newest model that the run has."""
    from agentrl.weights.version import latest

    announced = latest(config.run_dir / "weights")
    if announced is not None and announced.version > 0:
        return "rl", announced.folder
    if is_model(config.run_dir / "sft" / "model"):
        return "sft", config.run_dir / "sft" / "model"
    return "base", Path(config.model.path)


def run(config: RunConfig, model: Path, out: Path) -> int:
    """Run the evaluation in a process of its own; return 0, 75 or a failure's code."""
    from agentrl.tasks.load import load_split

    tasks = len(load_split(config.tasks, config.evaluation.split))
    tail, standing = EventTail(out / "events"), Standing()
    tail.read()  # those of an earlier call
    spool = out / "spool"

    def update(bar: Bar) -> None:
        standing.add(tail.read())
        solved = standing.reward_sum / max(1, standing.graded)
        text = f"solved {solved:.1%} · {standing.trajectories_per_hour():.0f} traj/h"
        bar.update(len(list_spool(spool)), text if standing.graded else "")

    role = functools.partial(evaluation_role, str(out / "config.yaml"), str(model), str(out))
    job = submit(out, {"evaluate": role}, nodes={}, grace_s=config.grace_s)
    bar = Bar(out.name, min(tasks, config.evaluation.tasks or tasks))
    with StopFlag() as stop:
        return watch(job, stop, bar, update, grace_s=config.grace_s)


def evaluation_role(config_path: str, model: str, out: str) -> Answer:
    """Evaluate into `out`."""
    from agentrl.evaluation import evaluate

    folder = Path(out)

    def body(stop: StopFlag, events: EventWriter) -> int:
        asyncio.run(
            evaluate(
                schema.load(config_path), model=Path(model), out=folder, stop=stop, events=events
            )
        )
        return DONE

    return errand(folder / "events", "eval", 0, body)


def told(out: Path) -> str:
    """Return pass@k with its interval, for a person."""
    summary = json.loads((out / "summary.json").read_bytes())
    shares = [
        f"pass@{k} {one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        for k, one in summary["pass_at"].items()
    ]
    return ", ".join([*shares, f"{summary['tasks']} tasks × {summary['attempts']}"])


if __name__ == "__main__":
    sys.exit(guard(main))
