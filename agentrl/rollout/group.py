"""The attempts of one draw, made at the same time, as one group."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from agentrl.events import Drop, GroupEvent, now
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.rollout.attempt import Attempt, Workshop, run_attempt
from agentrl.tasks.task import Task

log = logging.getLogger(__name__)


async def run_group(
    shop: Workshop,
    draw: int,
    task: Task,
    *,
    attempts: int,
    slots: asyncio.Semaphore,
    name: str = "",
) -> Group:
    """Run `attempts` of `task` and return them all, those without a reward too.

    slots: admits trajectories; the group's clock starts once each of its attempts is admitted.
    An attempt still running at rollout.group_timeout_s is cut and counts as lost, by its cause.
    """
    begin = now()
    cut = asyncio.Event()
    running: list[asyncio.Task[Trajectory]] = []
    try:
        for number in range(attempts):
            await slots.acquire()
            wanted = Attempt(draw=draw, task=task, attempt=number, name=name, is_cut=cut.is_set)
            one = asyncio.create_task(run_attempt(shop, wanted))
            one.add_done_callback(lambda _: slots.release())
            running.append(one)
        done, late = await asyncio.wait(
            running,
            timeout=shop.config.rollout.group_timeout_s,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for one in done:
            one.result()  # raises TooManyInfraFailures
        if late:
            cut.set()
    finally:
        await _cancel(running)
    group = make_group(
        draw,
        task.instance_id,
        [one.result() for one in running],
        min_group=shop.config.rollout.min_group,
    )
    report_group(shop, group, begin, draw=-1 if name else draw)
    return group


def make_group(
    draw: int, task_id: str, trajectories: Sequence[Trajectory], *, min_group: int
) -> Group:
    """Return the group, marked as dropped when fewer than `min_group` of it were graded."""
    graded = sum(one.reward is not None for one in trajectories)
    dropped = ""
    if graded < min_group:
        causes = Counter(one.cause for one in trajectories if one.reward is None)
        table = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        dropped = f"{graded} of {len(trajectories)} graded, rollout.min_group={min_group}: {table}"
    return Group(draw=draw, task_id=task_id, trajectories=tuple(trajectories), dropped=dropped)


def report_group(shop: Workshop, group: Group, begin: float, *, draw: int) -> None:
    versions = [span.version for one in group.trajectories for span in one.versions]
    shop.events.write(
        GroupEvent(
            draw=draw,
            task=group.task_id,
            rewards=[one.reward for one in group.trajectories],
            versions=[min(versions), max(versions)] if versions else [],
            start=begin,
            end=now(),
        )
    )
    if group.dropped:
        log.warning("group of draw %d is dropped: %s", group.draw, group.dropped)
        shop.events.write(Drop(what="group", reason=group.dropped, draw=draw, end=now()))


async def _cancel(running: Sequence[asyncio.Task[Trajectory]]) -> None:
    """Cancel what still runs and wait until each has closed its sandbox."""
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
