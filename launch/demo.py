"""`agentrl demo CONFIG [key=value …]`: the whole job on one machine, each stage by its own command.

prepare → sft → evaluate the SFT model → train → evaluate the RL model → report. What a stage has
already made is kept: after Ctrl-C (exit code 75) the same command goes on.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from launch.command import add_config, guard, parse, parser, say
from launch.run_dir import settled
from slurm import ledger

EVALUATED = ("held_out:1.0", "held_out:0.5", "unseen_sites:1.0", "unseen_functions:1.0")
"""Split and temperature. T=0.5 is a control: it shows how much of a gain is mere sharpening."""
CONTROL = "held_out:0.5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One command and the files that are there once it is done."""

    command: str
    argv: tuple[str, ...]
    products: tuple[Path, ...] = ()

    def is_done(self, run_dir: Path) -> bool:
        if self.command in ("train", "resume"):
            lines = ledger.read(run_dir)
            return bool(lines) and lines[-1].action == "done"
        return bool(self.products) and all(path.is_file() for path in self.products)


def main(argv: Sequence[str]) -> int:
    """Run the stages that are not done yet; print the table, the report and the time."""
    arguments = parser("demo", __doc__)
    add_config(arguments)
    arguments.add_argument(
        "--control-attempts",
        type=int,
        metavar="N",
        default=2,
        help="attempts at each task at T=0.5; there most of them end alike (default: 2)",
    )
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    if config.cluster.is_slurm:
        raise ConfigError(
            f"cluster={config.cluster.name}: the demo runs on this machine alone; on a cluster run "
            "`agentrl prepare`, `sft`, `train --wait` and `evaluate` one after the other"
        )
    began = time.monotonic()
    choice = [given.config, *given.overrides]
    for stage in stages(config, choice, control_attempts=given.control_attempts):
        code = play(stage, config.run_dir)
        if code:
            if code == 75:
                say(f"saved; the same command goes on:\n$ agentrl demo {shlex.join(argv)}")
            return code
    Console().print(results(config.run_dir))
    say(f"run {config.run_dir}, {(time.monotonic() - began) / 60:.1f} minutes in all")
    return 0


def stages(config: RunConfig, choice: list[str], *, control_attempts: int) -> list[Stage]:
    """Return the demo's stages in order. `choice` is CONFIG and its overrides."""
    run = config.run_dir
    has_begun = bool((run / "attempts").is_dir() and any((run / "attempts").iterdir()))
    train = Stage(command="train", argv=tuple(choice))
    if has_begun:
        train = Stage(command="resume", argv=(str(run),))
    return [
        Stage(command="prepare", argv=tuple(choice)),
        Stage(command="sft", argv=tuple(choice), products=(run / "sft" / "model" / "config.json",)),
        _evaluation(run, choice, "sft", control_attempts, model=run / "sft" / "model"),
        train,
        _evaluation(run, choice, "rl", control_attempts),
        Stage(command="report", argv=(str(run),)),
    ]


def _evaluation(
    run: Path, choice: list[str], label: str, control_attempts: int, *, model: Path | None = None
) -> Stage:
    wanted = [f"{one}:{control_attempts}" if one == CONTROL else one for one in EVALUATED]
    each = [word for one in wanted for word in ("--each", one)]
    which = ["--model", str(model)] if model else []
    outs = [f"{label}-{one.replace(':', '-T')}" for one in EVALUATED]
    return Stage(
        command="evaluate",
        argv=(*choice, "--label", label, *which, *each),
        products=tuple(run / "evaluations" / out / "summary.json" for out in outs),
    )


def play(stage: Stage, run_dir: Path) -> int:
    """Say the plain command, then run it unless it is done; return its exit code."""
    line = f"$ agentrl {stage.command} {shlex.join(stage.argv)}"
    if stage.is_done(run_dir):
        say(f"{line}   # done before")
        return 0
    say(line)
    began = time.monotonic()
    module = importlib.import_module(f"launch.{stage.command}")
    code = int(module.main(list(stage.argv)))
    say(f"  {stage.command}: {time.monotonic() - began:.1f} s")
    return code


def results(run_dir: Path) -> Table:
    """Lay out pass@1 and pass@k of every evaluation."""
    from analysis.evaluations import read_evaluation

    table = Table(title="What it learned (95 % intervals, bootstrap)")
    for column in ("evaluation", "tasks × attempts", "pass@1", "pass@k"):
        table.add_column(column)
    for path in sorted(run_dir.glob("evaluations/*/summary.json")):
        found = read_evaluation(path)
        cells = [
            f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
            for _, one in sorted(found.pass_at.items())
        ]
        largest = f"{cells[-1]} (k={max(found.pass_at)})" if cells else ""
        table.add_row(
            found.name, f"{found.tasks} × {found.attempts}", cells[0] if cells else "", largest
        )
    return table


if __name__ == "__main__":
    sys.exit(guard(main))
