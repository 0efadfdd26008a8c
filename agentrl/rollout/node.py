"""The inference role of one node: its engines, their weights, and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.engine import quarantine
from agentrl.engine.devices import EngineShare
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.errors import LaunchError
from agentrl.events import Writer
from agentrl.handoff.publish import publish_json
from agentrl.rollout.view import POLL_S, EnginesFile, TrainerView
from agentrl.rollout.worker_end import DONE, HOPELESS, STOPPED, told
from agentrl.weights import push
from agentrl.weights.quiet import is_quiet

log = logging.getLogger(__name__)
WORKER = "agentrl.rollout.worker"
MAX_CRASHES = 3
"""Crashes of one worker process, within one launch attempt, before the role gives up."""


async def run_node(
    config: RunConfig,
    *,
    node: int,
    attempt: int,
    run_dir: Path | None = None,
    stop: Callable[[], bool],
    events: Writer,
    shares: Sequence[EngineShare] = (),
) -> int:
    """Serve the run until the trainer is done (0) or `stop` asks (75).

    shares: each engine's GPUs and ports; none: they are numbered through from 0.
    Raises TooManyInfraFailures with the table of causes, what its workers raise that never mends,
    LaunchError when engines or workers keep failing, WaitTimeout when no trainer shows up.
    """
    run_dir = run_dir or config.run_dir
    attempt_dir = run_dir / "attempts" / f"{attempt:04d}"
    supervisor = EngineSupervisor(
        config.engine,
        model=Path(config.model.path),
        logs=attempt_dir / "logs" / f"node-{node}",
        events=events,
        shares=shares,
        is_quiet=lambda: is_quiet(run_dir / "weights"),
        node=node,
    )
    view = TrainerView(run_dir / "weights", attempt=attempt)
    ending = asyncio.Event()

    def is_stopping() -> bool:
        return stop() or ending.is_set()

    try:
        if config.weights == "collective":  # of a role here before, which may have been killed
            push.tell_members(attempt_dir, node, {})
        starting = asyncio.create_task(supervisor.start(view.refresh()))
        is_alone = config.rollout.workers == 1
        if is_alone:  # meanwhile, for it takes a while
            await asyncio.to_thread(importlib.import_module, WORKER)
        await starting
        follower = asyncio.create_task(_follow(config, supervisor, view, attempt_dir, node))
        if is_alone:
            work = _run_here(
                config, node, attempt, run_dir, is_stopping, supervisor=supervisor, events=events
            )
        else:
            work = _run_processes(config, node, attempt, run_dir, is_stopping)
        return await _first_of(follower, asyncio.create_task(work), ending)
    finally:
        if config.weights == "collective":
            with contextlib.suppress(OSError):  # a full disk: the trainer waits for us once
                push.tell_members(attempt_dir, node, {})
        await supervisor.close()


async def _first_of(
    follower: asyncio.Task[None], workers: asyncio.Task[int], ending: asyncio.Event
) -> int:
    """Return how the workers ended; a follower that fails ends them first."""
    try:
        await asyncio.wait({follower, workers}, return_when=asyncio.FIRST_COMPLETED)
        if follower.done():
            ending.set()
            await asyncio.wait({workers})
            follower.result()
        return workers.result()
    finally:
        for task in (follower, workers):
            task.cancel()
        await asyncio.gather(follower, workers, return_exceptions=True)


async def _follow(
    config: RunConfig,
    supervisor: EngineSupervisor,
    view: TrainerView,
    attempt_dir: Path,
    node: int,
) -> None:
    """Bring the engines to each announced version, and tell worker processes who serves it."""
    current = view.announced
    file = EnginesFile(attempt_dir, node)
    said: tuple[list[str], str] | None = None
    members: dict[str, str] | None = None
    has_told_suspect = False
    while True:
        newest = view.refresh()
        if newest is not None and (current is None or newest.identity != current.identity):
            log.info("node %d: engines go to version %d", node, newest.version)
            supervisor.quarantine(quarantine.asked(attempt_dir, node))
            await supervisor.update(newest)
            current = newest
        if supervisor.failed:
            raise supervisor.failed
        if supervisor.suspect and not has_told_suspect:
            publish_json(suspect_file(attempt_dir, node), {"reason": supervisor.suspect})
            has_told_suspect = True
        if config.weights == "collective" and members != (now := supervisor.members()):
            push.tell_members(attempt_dir, node, now)
            members = now
        state = (supervisor.urls(), supervisor.weights())
        if config.rollout.workers > 1 and state != said:
            file.publish(*state)
            said = state
        await asyncio.sleep(POLL_S)


def suspect_file(attempt_dir: Path, node: int) -> Path:
    """Where a node says why the next launch attempt should stay away from it."""
    return attempt_dir / f"suspect-{node}.json"


async def _run_here(
    config: RunConfig,
    node: int,
    attempt: int,
    run_dir: Path,
    stop: Callable[[], bool],
    *,
    supervisor: EngineSupervisor,
    events: Writer,
) -> int:
    """Be the node's only worker."""
    from agentrl.rollout.worker import run_worker  # not ahead of the engines' start

    return await run_worker(
        config,
        node=node,
        worker=0,
        attempt=attempt,
        run_dir=run_dir,
        urls=supervisor.urls,
        weights=supervisor.weights,
        stop=stop,
        events=events,
    )


async def _run_processes(
    config: RunConfig, node: int, attempt: int, run_dir: Path, stop: Callable[[], bool]
) -> int:
    """Keep this node's worker processes running; the first that fails for good ends them all."""
    ending = asyncio.Event()
    keepers = [
        asyncio.create_task(
            _keep(config, node, worker, attempt, run_dir, lambda: stop() or ending.is_set())
        )
        for worker in range(config.rollout.workers)
    ]
    try:
        await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
        ending.set()
        await asyncio.wait(keepers)
        codes = [keeper.result() for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
    return DONE if all(code == DONE for code in codes) else STOPPED


async def _keep(
    config: RunConfig,
    node: int,
    worker: int,
    attempt: int,
    run_dir: Path,
    stop: Callable[[], bool],
) -> int:
    """Run one worker process, again after a crash, at most MAX_CRASHES times."""
    attempt_dir = run_dir / "attempts" / f"{attempt:04d}"
    for crash in range(MAX_CRASHES + 1):
        code = await _run_process(run_dir, (node, worker, attempt), stop, config.grace_s)
        if code in (DONE, STOPPED):
            return code
        if code == HOPELESS:
            raise told(attempt_dir, node, worker)
        log.warning("worker %d of node %d ended with %d, crash %d", worker, node, code, crash + 1)
        if stop():
            return STOPPED
    raise LaunchError(
        f"worker {worker} of node {node} crashed {MAX_CRASHES + 1} times, last with exit {code}; "
        "its log is in the role's output"
    )


async def _run_process(
    run_dir: Path, ids: tuple[int, int, int], stop: Callable[[], bool], grace_s: float
) -> int:
    """Run one worker process to its end; a stop is a SIGTERM, and SIGKILL after `grace_s`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", WORKER),
        *(str(run_dir), *map(str, ids), str(os.getpid())),
    )
    try:
        waiter = asyncio.create_task(process.wait())
        while not waiter.done() and not stop():
            await asyncio.wait({waiter}, timeout=POLL_S)
        if not waiter.done():
            process.send_signal(signal.SIGTERM)
            await asyncio.wait({waiter}, timeout=grace_s)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return process.returncode if process.returncode is not None else -1
