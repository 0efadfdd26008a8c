"""`agentrl sft CONFIG [key=value …]`: expert traces in real sandboxes, then fine-tuning on them.

Traces are spool files below runs/NAME/sft/traces, the model is runs/NAME/sft/model. What is there
already is kept, so the same command goes on after Ctrl-C (exit code 75).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from agentrl.handoff.publish import publish_bytes
from launch.command import add_config, guard, parse, parser, say
from launch.progress import Bar, EventTail, Standing
from launch.run_dir import settled
from launch.signals import StopFlag
from launch.train import check_model, is_model
from slurm.exit_record import DONE, SAVED
from slurm.local import HetLocalExecutor, HetLocalJob

MAX_WORKERS = 2
POLL_S = 0.2


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
    stop = StopFlag().install()
    code = make_traces(config, folder, stop) or fine_tune(config, folder, stop)
    if code == SAVED:
        say(f"saved; the same command goes on:\n$ agentrl sft {' '.join(argv)}")
    return code


def make_traces(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run the workers that make traces, until all are there; return 0 or 75."""
    from agentrl.handoff.spool import list_spool
    from launch.traces import PER_FILE, files_wanted, traces_role

    wanted = files_wanted(config.sft.traces)
    there = len(list_spool(folder / "traces"))
    if there >= wanted:
        return DONE
    workers = min(MAX_WORKERS, os.cpu_count() or 1, wanted - there)
    role = functools.partial(traces_role, str(folder / "config.yaml"), str(folder), workers)
    tail, standing = EventTail(folder / "events"), Standing()
    tail.read()  # those of an earlier call
    before = there * PER_FILE

    def progress() -> tuple[int, str]:
        standing.add(tail.read())
        done = min(before + sum(standing.causes.values()), config.sft.traces)
        return done, f"{standing.trajectories_per_hour():.0f} traces/h"

    job = submit(folder / "job", folder / "logs", {"traces": role}, {"traces": workers}, config)
    return watch(job, stop, Bar("expert traces", config.sft.traces), progress, config.grace_s)


def fine_tune(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run the fine-tuning in a process of its own; return 0 or 75."""
    from launch.tuning import read_progress, tuning_role

    role = functools.partial(tuning_role, str(folder / "config.yaml"), str(folder))
    job = submit(folder / "job", folder / "logs", {"sft": role}, {}, config)
    bar = Bar("fine-tuning", 1)

    def progress() -> tuple[int, str]:
        done, total, text = read_progress(folder)
        bar.update(done, text, total=total)
        return done, text

    return watch(job, stop, bar, progress, config.grace_s)


def submit(
    folder: Path,
    logs: Path,
    roles: dict[str, Callable[..., int]],
    nodes: dict[str, int],
    config: RunConfig,
) -> HetLocalJob:
    executor = HetLocalExecutor(folder, logs=logs)
    executor.update_parameters(nodes=nodes, grace_s=config.grace_s)
    return executor.submit(roles)


def watch(
    job: HetLocalJob,
    stop: StopFlag,
    bar: Bar,
    progress: Callable[[], tuple[int, str]],
    grace_s: float,
) -> int:
    """Show progress until the job's end; hand a request to stop on. Returns 0 or 75.

    Raises LaunchError with the traceback of the role that failed first.
    """
    asked_at = 0.0
    try:
        with bar:
            while not job.done():
                bar.update(*progress())
                if stop() and not asked_at:
                    asked_at = time.monotonic()
                    bar.say(f"asked to stop ({stop.cause}); saving. Ctrl-C again kills")
                    stop.count = 1
                    for role in job.roles:
                        job.signal(role)
                late = bool(asked_at) and time.monotonic() - asked_at > grace_s
                if late or any(code not in (0, None) for code in job.ended().values()):
                    break  # one worker's failure ends them all
                if stop.count > 1:
                    break
                time.sleep(POLL_S)
            bar.update(*progress())
    finally:
        job.cancel()
    if asked_at:
        return SAVED
    for error in job.exceptions().values():
        raise LaunchError(str(error))
    codes = [code for by_node in job.results().values() for code in by_node]
    return max(codes, default=DONE)


if __name__ == "__main__":
    sys.exit(guard(main))
