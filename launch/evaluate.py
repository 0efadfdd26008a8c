"""`agentrl evaluate CONFIG [--model PATH] [--each SPLIT:T[:N]] [key=value …]`: pass@k of a model.

The model is, unless given, the run's newest version, else its fine-tuned model, else model.path.
Written is runs/NAME/evaluations/OUT/: summary.json, preds.json (mini-swe-agent's), every attempt.
`--each`, once or more, evaluates on several splits or temperatures with the engines started once.
The same command goes on after Ctrl-C (exit code 75).
"""

from __future__ import annotations

import asyncio
import dataclasses
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
    arguments.add_argument("--label", help="name of the model in the results (base, sft, rl)")
    arguments.add_argument("--out", help="name of the result (default: LABEL-SPLIT-TTEMPERATURE)")
    arguments.add_argument(
        "--each",
        action="append",
        metavar="SPLIT:T[:N]",
        help="evaluate this split at temperature T, N attempts a task",
    )
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    check_model(config)
    label, model = ("model", given.model.absolute()) if given.model else newest_model(config)
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: no config.json there; give a model's folder")
    if given.out and given.each:
        raise ConfigError("--out names one result and --each may make several; leave one out")
    wanted = [
        (one, config.run_dir / "evaluations" / (given.out or _name(one, given.label or label)))
        for one in chosen(config, given.each)
    ]
    for one, out in wanted:
        publish_bytes(out / "config.yaml", schema.to_yaml(one).encode())
    code = run(wanted, model)
    if code == SAVED:
        say(f"saved; the same command goes on:\n$ agentrl evaluate {shlex.join(argv)}")
    elif code == DONE:
        for _, out in wanted:
            say(f"{out.name}: {told(out)}")
    return code


def chosen(config: RunConfig, choices: Sequence[str] | None) -> list[RunConfig]:
    """Return one config a choice `SPLIT:T[:N]`; the given one when there is none."""
    made = []
    for choice in choices or ():
        split, _, numbers = choice.partition(":")
        temperature, _, attempts = numbers.partition(":")
        try:
            evaluation = dataclasses.replace(
                config.evaluation,
                split=split,
                temperature=float(temperature),
                attempts=int(attempts or config.evaluation.attempts),
            )
        except ValueError:
            raise ConfigError(
                f"--each {choice}: must be SPLIT:T or SPLIT:T:N, as held_out:0.5:2"
            ) from None
        made.append(dataclasses.replace(config, evaluation=evaluation))
    return made or [config]


def _name(config: RunConfig, label: str) -> str:
    return f"{label}-{config.evaluation.split}-T{config.evaluation.temperature}"


def newest_model(config: RunConfig) -> tuple[str, Path]:
    """Return (`rl`, `sft` or `base`, folder) of the newest model that the run has."""
    from agentrl.weights.version import latest

    announced = latest(config.run_dir / "weights")
    if announced is not None and announced.version > 0:
        return "rl", announced.folder
    if is_model(config.run_dir / "sft" / "model"):
        return "sft", config.run_dir / "sft" / "model"
    return "base", Path(config.model.path)


def run(wanted: Sequence[tuple[RunConfig, Path]], model: Path) -> int:
    """Run the evaluations in a process of its own; return 0, 75 or a failure's code."""
    config, first = wanted[0]
    total = sum(_size(one) for one, _ in wanted)
    tail, standing = EventTail(first / "events"), Standing()
    tail.read()  # those of an earlier call

    def update(bar: Bar) -> None:
        standing.add(tail.read())
        solved = standing.reward_sum / max(1, standing.graded)
        text = f"solved {solved:.1%} · {standing.trajectories_per_hour():.0f} traj/h"
        done = sum(len(list_spool(out / "spool")) for _, out in wanted)
        bar.update(done, text if standing.graded else "")

    role = functools.partial(evaluation_role, str(model), [str(out) for _, out in wanted])
    job = submit(first, {"evaluate": role}, nodes={}, grace_s=config.grace_s)
    bar = Bar(first.name if len(wanted) == 1 else f"{len(wanted)} evaluations", total)
    with StopFlag() as stop:
        return watch(job, stop, bar, update, grace_s=config.grace_s)


def _size(config: RunConfig) -> int:
    from agentrl.tasks.load import load_split

    tasks = len(load_split(config.tasks, config.evaluation.split))
    return min(tasks, config.evaluation.tasks or tasks)


def evaluation_role(model: str, outs: list[str]) -> Answer:
    """Evaluate into each of `outs`, one after the other, as its config.yaml says."""
    from agentrl.evaluation import evaluate, serving

    folders = [Path(out) for out in outs]

    async def all_of(stop: StopFlag, events: EventWriter) -> None:
        wanted = [(schema.load(out / "config.yaml"), out) for out in folders]
        async with serving(wanted[0][0], Path(model), folders[0] / "logs", events) as engines:
            for config, out in wanted:
                await evaluate(
                    config, model=Path(model), out=out, stop=stop, events=events, engines=engines
                )

    def body(stop: StopFlag, events: EventWriter) -> int:
        asyncio.run(all_of(stop, events))
        return DONE

    return errand(folders[0] / "events", "eval", 0, body)


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
