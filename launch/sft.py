"""`agentrl sft CONFIG [key=value …]`: expert traces in real sandboxes, then fine-tuning on them.

Traces are spool files below runs/NAME/sft/traces, the model is runs/NAME/sft/model. What is there
already is kept, so the same command goes on after Ctrl-C (exit code 75).
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
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

MAX_WORKERS = 2
LOSSES = "losses.jsonl"


def main(argv: Sequence[str]) -> int:
    """Make what is missing of traces and model."""
    arguments = parser("sft", __doc__)
    add_config(arguments)
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    check_model(config)
    folder = config.run_dir / "sft"
    if is_model(folder / "model"):
        say(f"{folder / 'model'} is there already; remove {folder} to make it anew")
        return DONE
    publish_bytes(folder / "config.yaml", schema.to_yaml(config).encode())
    with StopFlag() as stop:
        code = make_traces(config, folder, stop) or fine_tune(config, folder, stop)
    if code == SAVED:
        say(f"saved; the same command goes on:\n$ agentrl sft {shlex.join(argv)}")
    elif code == DONE:
        say(f"fine-tuned model: {folder / 'model'}")
    return code


def make_traces(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run the workers that make traces, until all are there; return 0, 75 or a failure's code."""
    from launch.traces import PER_FILE, files_wanted, traces_role

    wanted = files_wanted(config.sft.traces)
    there = len(list_spool(folder / "traces"))
    if there >= wanted:
        return DONE
    workers = min(MAX_WORKERS, os.cpu_count() or 1, wanted - there)
    tail, standing = EventTail(folder / "events"), Standing()
    tail.read()  # those of an earlier call

    def update(bar: Bar) -> None:
        standing.add(tail.read())
        done = there * PER_FILE + standing.trajectories
        bar.update(min(done, config.sft.traces), f"{standing.trajectories_per_hour():.0f} traces/h")

    role = functools.partial(traces_role, str(folder / "config.yaml"), str(folder), workers)
    job = submit(folder, {"traces": role}, nodes={"traces": workers}, grace_s=config.grace_s)
    bar = Bar("expert traces", config.sft.traces)
    return watch(job, stop, bar, update, grace_s=config.grace_s)


def fine_tune(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run the fine-tuning in a process of its own; return 0, 75 or a failure's code."""

    def update(bar: Bar) -> None:
        step, steps, loss = read_progress(folder / LOSSES)
        bar.update(step, f"loss {loss:.3f}" if step else "", total=steps)

    role = functools.partial(tuning_role, str(folder / "config.yaml"), str(folder))
    job = submit(folder, {"sft": role}, nodes={}, grace_s=config.grace_s)
    return watch(job, stop, Bar("fine-tuning", 1), update, grace_s=config.grace_s)


def tuning_role(config_path: str, folder: str) -> Answer:
    """Fine-tune on folder/traces into folder/model, a line a step in folder/losses.jsonl."""
    from agentrl.training.sft import run_sft

    config = schema.load(config_path)
    home = Path(folder)

    def body(stop: StopFlag, events: EventWriter) -> int:
        with (home / LOSSES).open("a", buffering=1) as losses:

            def progress(step: int, steps: int, loss: float) -> None:
                line = {"step": step, "steps": steps, "loss": loss, "time": time.time()}
                losses.write(json.dumps(line) + "\n")

            return run_sft(
                config, home / "traces", home / "model", stop=stop, events=events, progress=progress
            )

    return errand(home / "events", "sft", 0, body)


def read_progress(path: Path) -> tuple[int, int, float]:
    """Return (step, steps, loss) of the last whole line; (0, 1, 0.0) before there is one."""
    if not path.is_file():
        return 0, 1, 0.0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1000))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    if not lines:
        return 0, 1, 0.0
    newest = json.loads(lines[-1])
    return int(newest["step"]), int(newest["steps"]), float(newest["loss"])


if __name__ == "__main__":
    sys.exit(guard(main))
