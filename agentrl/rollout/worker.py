"""One worker: makes the groups of its shard of draws, as far ahead of the trainer as is allowed.

As a process of its own: `python -m agentrl.rollout.worker RUN_DIR NODE WORKER ATTEMPT PARENT`;
it ends by itself once PARENT, a process id, is no longer its parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl import config as configs
from agentrl.config import RunConfig
from agentrl.errors import WaitTimeout
from agentrl.events import EventWriter, Writer
from agentrl.handoff.replayed import replayed_experts
from agentrl.handoff.spool import list_spool
from agentrl.rollout.attempt import Workshop
from agentrl.rollout.draws import may_start, shard, task_of
from agentrl.rollout.group import run_group
from agentrl.rollout.sender import GroupSender, open_sender
from agentrl.rollout.view import POLL_S, EnginesFile, TrainerView
from agentrl.rollout.worker_end import DONE, HOPELESS, STOPPED, TOLD, tell
from agentrl.rollout.workshop import open_workshop
from agentrl.tasks.load import load_split
from agentrl.tasks.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker's share of a run."""

    shop: Workshop
    tasks: Sequence[Task]
    draws: Iterator[int]
    """Its shard, lowest first."""
    spool: Path
    sender: GroupSender
    view: TrainerView
    stop: Callable[[], bool]
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> int:
        """Work until the trainer is done (0) or `stop` asks (75).

        Groups in flight then are cancelled, their sandboxes closed; their draws are issued again
        after a resume. Raises TooManyInfraFailures, WaitTimeout, HandoffError, and OSError of a
        full disk.
        """
        slots = asyncio.Semaphore(self.shop.config.rollout.concurrency)
        try:
            await self._wait_for_trainer()
            waiting = list_spool(self.spool)
            for draw in self.draws:
                if draw in waiting or draw in self.view.consumed:
                    continue
                if not await self._until_startable(draw, slots):
                    break
                self.running.add(asyncio.create_task(self._make_group(draw, slots)))
        finally:
            for group in self.running:
                group.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)
        return DONE if self.view.done else STOPPED

    async def _make_group(self, draw: int, slots: asyncio.Semaphore) -> None:
        config = self.shop.config
        task = self.tasks[task_of(draw, len(self.tasks), config.seed)]
        group = await run_group(
            self.shop, draw, task, attempts=config.rollout.attempts_per_task, slots=slots
        )
        await asyncio.to_thread(self.shop.events.sync)  # a group that counts has been told of
        await self.sender.write(group)

    async def _until_startable(self, draw: int, slots: asyncio.Semaphore) -> bool:
        """Wait until `draw` may start and a slot is free; False when the work is over."""
        config = self.shop.config
        while not self._is_over():
            self._raise_failures()
            is_free = not slots.locked() and not self.sender.is_full
            if is_free and may_start(
                draw,
                self.view.consumed,
                groups_per_step=config.training.groups_per_step,
                max_staleness=config.rollout.max_staleness,
            ):
                return True
            await self._pause()
        return False

    async def _wait_for_trainer(self) -> None:
        limit_s = self.shop.config.training.wait_timeout_s
        deadline = time.monotonic() + limit_s
        while not self._is_over() and self.view.announced is None:
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"no weights announced within training.wait_timeout_s={limit_s:g}: the trainer "
                    "of this launch attempt is missing; read its log"
                )
            await asyncio.sleep(POLL_S)

    def _is_over(self) -> bool:
        self.view.refresh()
        return self.stop() or self.view.done

    def _raise_failures(self) -> None:
        for group in [one for one in self.running if one.done()]:
            self.running.remove(group)
            group.result()

    async def _pause(self) -> None:
        """Wait a moment, less when a group ends."""
        if not self.running:
            await asyncio.sleep(POLL_S)
            return
        await asyncio.wait(self.running, timeout=POLL_S / 2, return_when=asyncio.FIRST_COMPLETED)


async def run_worker(
    config: RunConfig,
    *,
    node: int,
    worker: int,
    attempt: int,
    run_dir: Path,
    urls: Callable[[], Sequence[str]],
    weights: Callable[[], str],
    stop: Callable[[], bool],
    events: Writer,
) -> int:
    """Open what a worker needs and run it; 0 when the trainer is done, 75 when stopped."""
    async with (
        open_sender(config, run_dir, node=node, attempt=attempt, events=events) as sender,
        open_workshop(
            config,
            node=node,
            urls=urls,
            weights=weights,
            leases=run_dir / "leases",
            events=events,
            experts=replayed_experts(config),
        ) as shop,
    ):
        return await Worker(
            shop=shop,
            tasks=load_split(config.tasks, "train"),
            draws=shard(
                node=node, nodes=config.rollout.nodes, worker=worker, workers=config.rollout.workers
            ),
            spool=run_dir / "spool",
            sender=sender,
            view=TrainerView(run_dir / "weights", attempt=attempt),
            stop=stop,
        ).run()


def main(arguments: Sequence[str]) -> int:
    """Run a worker process."""
    run_dir = Path(arguments[0])
    node, worker, attempt, parent = map(int, arguments[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asked = [False]
    signal.signal(signal.SIGTERM, lambda *_: asked.__setitem__(0, True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the node process, which tells us
    attempt_dir = run_dir / "attempts" / f"{attempt:04d}"
    events = EventWriter(run_dir / "events", "inference", node=str(node))
    engines = EnginesFile(attempt_dir, node)
    try:
        return asyncio.run(
            run_worker(
                configs.load(run_dir / "config.yaml"),
                node=node,
                worker=worker,
                attempt=attempt,
                run_dir=run_dir,
                urls=engines.urls,
                weights=engines.weights,
                stop=lambda: asked[0] or os.getppid() != parent,
                events=events,
            )
        )
    except TOLD as error:
        tell(attempt_dir, node, worker, error)
        return HOPELESS
    finally:
        events.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
