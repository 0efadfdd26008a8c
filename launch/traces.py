"""The role that makes expert traces: the scripted expert in place of an engine, all else as it is.

Traces go through rollout's own attempt path, in real sandboxes, and are written as spool files.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from agentrl.config import RunConfig, load
from agentrl.events import EventWriter
from agentrl.handoff.spool import SpoolWriter, list_spool
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.rollout.attempt import Attempt, Workshop, run_attempt
from agentrl.rollout.draws import task_of
from agentrl.rollout.workshop import open_workshop
from agentrl.sandbox.base import Sandbox
from agentrl.tasks.expert import ExpertEngine
from agentrl.tasks.load import load_split
from agentrl.tasks.task import Task, Verdict
from launch.errand import Answer, errand
from launch.signals import StopFlag
from slurm.exit_record import DONE, SAVED

PER_FILE = 50
"""Traces in one spool file; what an interruption can lose in each worker."""
CONCURRENCY = 12
"""Traces in flight in one worker: its time is the sandboxes' time."""
SPLITS = {"repair": "sft"}
"""Where the tasks for traces come from, else `train`; the generator keeps some for it."""


def traces_role(config_path: str, folder: str, workers: int, node: int) -> Answer:
    """Make this worker's share of sft.traces below `folder`; code 0, or 75 when asked to stop."""

    def body(stop: StopFlag, events: EventWriter) -> int:
        work = _make(
            load(config_path), Path(folder), node=node, workers=workers, stop=stop, events=events
        )
        return asyncio.run(work)

    return errand(Path(folder) / "events", "sft", node, body)


async def _make(
    config: RunConfig, folder: Path, *, node: int, workers: int, stop: StopFlag, events: EventWriter
) -> int:
    tasks = load_split(config.tasks, SPLITS.get(config.tasks.source, "train"))
    writer = SpoolWriter(folder / "traces", node)
    there = list_spool(folder / "traces")
    leases = config.run_dir / "leases"
    async with open_workshop(
        config, node=node, urls=lambda: (), leases=leases, events=events
    ) as shop:
        for number in range(node, files_wanted(config.sft.traces), workers):
            if number in there:
                continue
            found = await _make_file(shop, tasks, number, stop)
            if stop():
                return SAVED
            writer.write(Group(draw=number, task_id="traces", trajectories=tuple(found)))
    return DONE


def files_wanted(traces: int) -> int:
    return -(-traces // PER_FILE)


async def _make_file(
    shop: Workshop, tasks: list[Task], number: int, stop: StopFlag
) -> list[Trajectory]:
    """Make one file's traces, CONCURRENCY at a time, without those that infrastructure lost."""
    wanted = iter(_wanted(shop.config, tasks, number))
    found: list[Trajectory] = []

    async def work() -> None:
        for attempt in wanted:
            if stop():
                return
            trace = await run_attempt(_with_expert(shop, attempt), attempt)
            if trace.reward is not None:
                found.append(trace)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return sorted(found, key=lambda trace: trace.attempt)


def _wanted(config: RunConfig, tasks: list[Task], number: int) -> Iterator[Attempt]:
    for place in range(min(PER_FILE, config.sft.traces - number * PER_FILE)):
        trace = number * PER_FILE + place
        task = tasks[task_of(trace, len(tasks), config.seed)]
        yield Attempt(draw=number, task=task, attempt=place, name=f"trace-{number}")


def _with_expert(shop: Workshop, wanted: Attempt) -> Workshop:
    seed = (shop.config.seed * 1_000_003 + wanted.draw) * PER_FILE + wanted.attempt
    expert = ExpertEngine(
        shop.tokens,
        wanted.task,
        seed=seed,
        accuracy=shop.config.sft.expert_accuracy,
        mode=shop.config.agent.mode,
    )
    return dataclasses.replace(shop, engine=expert, grader=_no_verdict, takes_patches=False)


async def _no_verdict(task: Task, sandbox: Sandbox, *, image: Path, timeout_s: float) -> Verdict:
    """Stand where a grader is wanted: a trace teaches by what it does, solved or not."""
    del task, sandbox, image, timeout_s
    return Verdict(resolved=False, passed=(), failed=(), log="a trace is not graded")
