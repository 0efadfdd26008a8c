"""Evaluation: n attempts at each task of a split, pass@k with intervals, and predictions.

Same attempts as in training, and resumable: a task whose attempts are all graded keeps its file.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import RunConfig
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.errors import ConfigError, Interrupted
from agentrl.estimators import cluster_mean, pass_at_k
from agentrl.estimators import paired_difference as paired_difference
from agentrl.events import Writer, now
from agentrl.handoff.publish import publish_json
from agentrl.handoff.spool import SpoolWriter, list_spool, read_group
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.rollout.attempt import Workshop
from agentrl.rollout.group import run_group
from agentrl.rollout.view import POLL_S
from agentrl.rollout.workshop import open_workshop
from agentrl.tasks.load import load_split
from agentrl.tasks.task import Task

log = logging.getLogger(__name__)
Report = Callable[[int, int], None]
"""Told (tasks done, tasks in all) whenever the first grows."""


async def evaluate(
    config: RunConfig,
    *,
    model: Path,
    out: Path,
    stop: Callable[[], bool],
    events: Writer,
    progress: Report = lambda done, total: None,
    engines: EngineSupervisor | None = None,
) -> dict[str, Any]:
    """Evaluate the model folder `model` as config.evaluation says; return what summary.json holds.

    engines: started on `model` already; without them its own are started and closed.
    Writes out/summary.json, out/preds.json and out/spool/. Raises Interrupted when stopped (the
    same call goes on later), ConfigError when `out` holds an evaluation with other settings,
    TooManyInfraFailures, LaunchError.
    """
    begin = now()
    tasks = load_split(config.tasks, config.evaluation.split)
    tasks = tasks[: config.evaluation.tasks or len(tasks)]
    settings = _settings(config, model, tasks)
    _claim(out, settings)
    todo = _unfinished(out / "spool", tasks, config.evaluation.attempts)
    progress(len(tasks) - len(todo), len(tasks))
    if todo:
        async with AsyncExitStack() as stack:
            if engines is None:
                logs = out / "logs"
                engines = await stack.enter_async_context(serving(config, model, logs, events))
            await _attempt_all(config, model, out, tasks, todo, stop, events, progress, engines)
    groups = _read_all(out / "spool", tasks)
    summary = summarize(groups, tasks, settings) | {"seconds": round(now() - begin, 3)}
    publish_json(out / "preds.json", predictions(groups, settings["model"]))
    publish_json(out / "summary.json", summary)
    return summary


def summarize(
    groups: Sequence[Group], tasks: Sequence[Task], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary of finished groups; failures of ours are counted and in no mean."""
    graded = [[one for one in group.trajectories if one.reward is not None] for group in groups]
    attempts = np.array([len(one) for one in graded], np.int64)
    solved = np.array([sum(_is_solved(one) for one in row) for row in graded], np.int64)
    clusters = [_cluster(task) for task in tasks]
    causes = Counter(one.cause for group in groups for one in group.trajectories)
    retried = sum(one.tries - 1 for group in groups for one in group.trajectories)
    shares = {
        group.task_id: float(right / count)
        for group, right, count in zip(groups, solved, attempts, strict=True)
        if count
    }
    return {
        "split": settings["split"],
        "temperature": settings["temperature"],
        "tasks": len(tasks),
        "attempts": settings["attempts"],
        "pass_at": _pass_at(attempts, solved, clusters, settings),
        "per_task": shares,
        "repository": {task.instance_id: task.repo for task in tasks if task.repo},
        "difficulty": {task.instance_id: task.difficulty for task in tasks if task.difficulty},
        "clusters": {task.instance_id: name for task, name in zip(tasks, clusters, strict=True)},
        "causes": dict(causes.most_common()),
        "ungraded": int(sum(len(group.trajectories) for group in groups) - attempts.sum()),
        "retried": retried,
        "results": {
            group.task_id: {"graded": int(count), "solved": int(right)}
            for group, right, count in zip(groups, solved, attempts, strict=True)
        },
        "settings": dict(settings),
    }


def predictions(groups: Sequence[Group], model: str) -> dict[str, dict[str, str]]:
    """Return mini-swe-agent's preds.json: one patch a task, that of its first graded attempt."""
    first = {
        group.task_id: min(
            (one for one in group.trajectories if one.reward is not None),
            key=lambda one: one.attempt,
            default=None,
        )
        for group in groups
    }
    return {
        task_id: {
            "model_name_or_path": model,
            "instance_id": task_id,
            "model_patch": one.patch if one else "",
        }
        for task_id, one in first.items()
    }


def _pass_at(
    attempts: np.ndarray[Any, np.dtype[np.int64]],
    solved: np.ndarray[Any, np.dtype[np.int64]],
    clusters: Sequence[str],
    settings: Mapping[str, Any],
) -> dict[str, dict[str, float]]:
    """Return pass@k for k = 1, 2, 4, … and all; each over the tasks with k graded attempts."""
    wanted = int(settings["attempts"])
    found = {}
    for k in sorted({2**power for power in range(wanted.bit_length())} | {wanted}):
        enough = np.flatnonzero(attempts >= k)
        if not len(enough) or k > wanted:
            continue
        scores = pass_at_k(attempts[enough], solved[enough], k)
        names = [clusters[int(place)] for place in enough]
        found[str(k)] = cluster_mean(scores, names, samples=settings["bootstrap"]).as_dict
    return found


@asynccontextmanager
async def serving(
    config: RunConfig, model: Path, logs: Path, events: Writer
) -> AsyncIterator[EngineSupervisor]:
    """Yield engines that serve `model`; closed at the end."""
    engines = EngineSupervisor(config.engine, model=model, logs=logs, events=events)
    try:
        await engines.start(None)
        yield engines
    finally:
        await engines.close()


async def _attempt_all(
    config: RunConfig,
    model: Path,
    out: Path,
    tasks: Sequence[Task],
    todo: Sequence[int],
    stop: Callable[[], bool],
    events: Writer,
    progress: Report,
    engines: EngineSupervisor,
) -> None:
    async with open_workshop(
        config,
        node=0,
        urls=engines.urls,
        weights=engines.weights,
        leases=out / "leases",
        events=events,
        temperature=config.evaluation.temperature,
        tokenizer=model if (model / "tokenizer.json").is_file() else None,
    ) as shop:

        def check() -> None:
            if stop():
                raise Interrupted(f"evaluation into {out}: stopped; run it again to go on")
            if engines.failed:
                raise engines.failed

        shop = replace(shop, takes_patches=True)  # preds.json needs them
        await run_groups(shop, tasks, todo, out / "spool", check=check, progress=progress)


async def run_groups(
    shop: Workshop,
    tasks: Sequence[Task],
    todo: Sequence[int],
    spool: Path,
    *,
    check: Callable[[], None] = lambda: None,
    progress: Report = lambda done, total: None,
) -> None:
    """Make and write the group of each task in `todo` (indices into `tasks`).

    check: called several times a second; what it raises ends the work, sandboxes closed.
    """
    writer = SpoolWriter(spool, 0)
    slots = asyncio.Semaphore(shop.config.rollout.concurrency)
    running: set[asyncio.Task[None]] = set()
    waiting, left = list(reversed(todo)), len(todo)

    async def one(index: int) -> None:
        group = await run_group(
            shop,
            index,
            tasks[index],
            attempts=shop.config.evaluation.attempts,
            slots=slots,
            name=tasks[index].instance_id,
        )
        await asyncio.to_thread(writer.write, group)

    try:
        while waiting or running:
            check()
            if waiting and not slots.locked():
                running.add(asyncio.create_task(one(waiting.pop())))
                await asyncio.sleep(0)  # it takes its slots
                continue
            done, running = await asyncio.wait(
                running, timeout=POLL_S / 2, return_when=asyncio.FIRST_COMPLETED
            )
            for finished in done:
                finished.result()
            left -= len(done)
            if done:
                progress(len(tasks) - left, len(tasks))
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _settings(config: RunConfig, model: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    weights = sorted(model.glob("*.safetensors"))
    return {
        "model": str(model),
        "weights": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weights},
        "split": config.evaluation.split,
        "attempts": config.evaluation.attempts,
        "temperature": config.evaluation.temperature,
        "bootstrap": config.evaluation.bootstrap,
        "seed": config.seed,
        "task_ids": [task.instance_id for task in tasks],
        "agent": asdict(config.agent),
        "sandbox": config.sandbox.kind,
        "engine": config.engine.kind,
    }


def _claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings in `out`, or compare them with those that it was begun with."""
    path = out / "settings.json"
    if path.is_file():
        begun = json.loads(path.read_bytes())
        wanted = json.loads(json.dumps(settings))
        if other := [key for key in wanted if begun.get(key) != wanted[key]]:
            raise ConfigError(
                f"{out}: begun with another {', '.join(other)}; choose another folder, or delete it"
            )
        return
    publish_json(path, settings)


def _unfinished(spool: Path, tasks: Sequence[Task], attempts: int) -> list[int]:
    """Return the tasks without a file of `attempts` graded trajectories, in the split's order."""
    finished = set()
    for index, path in list_spool(spool).items():
        group = read_group(path)
        graded = sum(one.reward is not None for one in group.trajectories)
        if index < len(tasks) and group.task_id == tasks[index].instance_id and graded >= attempts:
            finished.add(index)
    return [index for index in range(len(tasks)) if index not in finished]


def _read_all(spool: Path, tasks: Sequence[Task]) -> list[Group]:
    files = list_spool(spool)
    return [read_group(files[index]) for index in range(len(tasks))]


def _is_solved(one: Trajectory) -> bool:
    return one.reward is not None and one.reward >= 1.0


def _cluster(task: Task) -> str:
    return task.cluster or task.instance_id
