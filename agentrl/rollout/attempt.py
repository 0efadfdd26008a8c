"""One attempt at a task: sandbox, agent, tests, outcome; tried again when we were to blame."""

from __future__ import annotations

import asyncio
import logging
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from agentrl.agent.loop import AgentResult, run_agent
from agentrl.agent.prompts import Prompts
from agentrl.agent.tokens import ChatTokens, TokenBuffer
from agentrl.config import AgentConfig, RunConfig
from agentrl.engine.base import Engine
from agentrl.errors import InfraError
from agentrl.events import Grade, SandboxStart, Setup, TrajectoryEvent, Writer, now
from agentrl.handoff.trajectory import Trajectory
from agentrl.rollout.infra import InfraWindow
from agentrl.rollout.outcome import RULES, Outcome
from agentrl.rollout.patch import take_patch
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.tasks.grade import grade
from agentrl.tasks.task import Task, Verdict

log = logging.getLogger(__name__)


class Agent(Protocol):
    """What `agent.loop.run_agent` is."""

    async def __call__(
        self,
        *,
        task: Task,
        sandbox: Sandbox,
        engine: Engine,
        tokens: ChatTokens,
        prompts: Prompts,
        config: AgentConfig,
        trajectory: str,
        events: Writer,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> AgentResult: ...


class Grader(Protocol):
    """What `tasks.grade.grade` is."""

    async def __call__(
        self, task: Task, sandbox: Sandbox, *, image: Path, timeout_s: float
    ) -> Verdict: ...


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all attempts of one process share."""

    config: RunConfig
    node: int
    provider: SandboxProvider
    engine: Engine
    tokens: ChatTokens
    prompts: Prompts
    image_of: Callable[[Task], Path]
    """Makes the image folder on first use; called in a thread."""
    events: Writer
    infra: InfraWindow
    starts: Admission
    """Admits to the provider, which has it too; waiting here is the `queued` phase."""
    agent: Agent = run_agent
    grader: Grader = grade
    temperature: float | None = None
    """None: agent.temperature."""
    takes_patches: bool = True
    """Whether a trajectory records the agent's changes as a patch."""
    images: dict[str, asyncio.Future[Path]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Which trajectory is wanted."""

    draw: int
    task: Task
    attempt: int
    name: str = ""
    """First part of the trajectory's id, in evaluation; empty: the draw."""
    is_cut: Callable[[], bool] = lambda: False
    """Whether its group's time is used up: a cancellation then ends this attempt, not the run."""

    def trajectory(self, number: int) -> str:
        return f"{self.name or self.draw}/{self.attempt}/{number}"


@dataclass(kw_only=True, slots=True)
class Progress:
    """What one try has so far; a failure keeps what was reached."""

    seconds: dict[str, float] = field(default_factory=dict)
    result: AgentResult | None = None
    patch: str = ""


async def run_attempt(shop: Workshop, wanted: Attempt) -> Trajectory:
    """Return the first try that the policy decided, or the last one within rollout.retries.

    Every failure of ours is an outcome with reward None, as is the end of the group's time; only
    TooManyInfraFailures and a cancellation for another reason rise.
    """
    for number in range(shop.config.rollout.retries + 1):
        trajectory, detail = await _run_try(shop, wanted, number)
        shop.infra.record(trajectory.cause, detail)
        if not RULES[trajectory.cause].is_retried:
            break
    return trajectory


async def _run_try(shop: Workshop, wanted: Attempt, number: int) -> tuple[Trajectory, str]:
    """Return the trajectory, and of a failure the last line of what was raised."""
    begin = now()
    progress = Progress()
    detail = error_line = ""
    try:
        outcome = await _play(shop, wanted, number, progress)
    except asyncio.CancelledError:
        outcome = _cancelled(wanted)
        if outcome is CANCELLED:
            made = _trajectory(shop, wanted, number, progress, outcome)
            _report(shop, wanted, number, made, begin)
            raise
        detail = error_line = f"cancelled: {RULES[outcome.cause].meaning}"
    except InfraError as error:
        outcome = Outcome(cause=error.cause, reward=None)
        detail = error_line = f"{type(error).__name__}: {error}"
    except Exception as error:  # one exception costs one trajectory, never the step
        outcome = Outcome(cause="infra", reward=None)
        error_line = f"{type(error).__name__}: {error}"
        detail = traceback.format_exc()
        log.exception("trajectory %s failed unexpectedly", wanted.trajectory(number))
    progress.seconds["total"] = now() - begin
    trajectory = _trajectory(shop, wanted, number, progress, outcome)
    _report(shop, wanted, number, trajectory, begin, detail)
    return trajectory, error_line


CANCELLED = Outcome(cause="cancelled", reward=None)


def _cancelled(wanted: Attempt) -> Outcome:
    """Return what a cancellation means that reached an attempt."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        return Outcome(cause="infra", reward=None)  # something that it waited for was cancelled
    return Outcome(cause="group_timeout", reward=None) if wanted.is_cut() else CANCELLED


async def _play(shop: Workshop, wanted: Attempt, number: int, progress: Progress) -> Outcome:
    """Go through the phases, each noted in `progress` as it ends."""
    trajectory = wanted.trajectory(number)
    image = await _set_up(shop, wanted.task, trajectory, progress)
    sandbox = await _start(shop, image, trajectory, progress)
    try:
        result = progress.result = await shop.agent(
            task=wanted.task,
            sandbox=sandbox,
            engine=shop.engine,
            tokens=shop.tokens,
            prompts=shop.prompts,
            config=shop.config.agent,
            trajectory=trajectory,
            events=shop.events,
            temperature=shop.temperature,
            seed=zlib.crc32(f"{shop.config.seed}/{trajectory}".encode()) >> 1,
        )
        progress.seconds |= {"model": result.model_s, "command": result.command_s}
        if not RULES[result.cause].is_graded:
            return Outcome(cause=result.cause, reward=None)
        if shop.takes_patches:
            begin = now()
            progress.patch = await take_patch(wanted.task, sandbox, image)
            progress.seconds["patch"] = now() - begin
        return await _grade(shop, wanted.task, sandbox, image, trajectory, progress)
    finally:
        await sandbox.close()


async def _set_up(shop: Workshop, task: Task, trajectory: str, progress: Progress) -> Path:
    begin = now()
    future = shop.images.get(task.instance_id)
    if future is None or (future.done() and (future.cancelled() or future.exception())):
        future = asyncio.ensure_future(asyncio.to_thread(shop.image_of, task))
        shop.images[task.instance_id] = future
    image = future.result() if future.done() else await asyncio.shield(future)
    progress.seconds["setup"] = now() - begin
    shop.events.write(Setup(trajectory=trajectory, start=begin, end=now()))
    return image


async def _start(shop: Workshop, image: Path, trajectory: str, progress: Progress) -> Sandbox:
    asked = now()
    async with shop.starts.turn():
        begin = now()
        progress.seconds["queued"] = begin - asked
        try:
            sandbox = await shop.provider.start(image, owner=trajectory)
        except InfraError as error:
            _report_start(shop, trajectory, asked, begin - asked, str(error) or repr(error))
            raise
    progress.seconds["sandbox_start"] = now() - begin
    _report_start(shop, trajectory, asked, begin - asked, "")
    return sandbox


def _report_start(
    shop: Workshop, trajectory: str, begin: float, queued_s: float, error: str
) -> None:
    shop.events.write(
        SandboxStart(
            trajectory=trajectory,
            backend=shop.provider.name,
            queued_s=queued_s,
            ok=not error,
            detail=error,
            start=begin,
            end=now(),
        )
    )


async def _grade(
    shop: Workshop,
    task: Task,
    sandbox: Sandbox,
    image: Path,
    trajectory: str,
    progress: Progress,
) -> Outcome:
    begin = now()
    verdict = await shop.grader(
        task, sandbox, image=image, timeout_s=shop.config.tasks.grade_timeout_s
    )
    progress.seconds["grade"] = now() - begin
    shop.events.write(
        Grade(
            trajectory=trajectory,
            resolved=verdict.resolved,
            passed=len(verdict.passed),
            failed=len(verdict.failed),
            start=begin,
            end=now(),
        )
    )
    assert progress.result is not None  # the agent ended before the tests began
    return Outcome(cause=progress.result.cause, reward=float(verdict.resolved))


def _trajectory(
    shop: Workshop, wanted: Attempt, number: int, progress: Progress, outcome: Outcome
) -> Trajectory:
    result = progress.result
    buffer = result.buffer if result else TokenBuffer(())
    return Trajectory(
        run=shop.config.name,
        draw=wanted.draw,
        task_id=wanted.task.instance_id,
        attempt=wanted.attempt,
        node=shop.node,
        tokens=np.asarray(buffer.tokens, np.int32),
        logprobs=np.asarray(buffer.logprobs, np.float32),
        loss_mask=np.asarray(buffer.loss_mask, np.bool_),
        experts=buffer.experts,
        versions=tuple(buffer.versions),
        reward=outcome.reward,
        cause=outcome.cause,
        turns=result.turns if result else 0,
        tries=number + 1,
        seconds=progress.seconds,
        messages=result.to_trajectory_json() if result else "{}",
        patch=progress.patch,
    )


def _report(
    shop: Workshop,
    wanted: Attempt,
    number: int,
    trajectory: Trajectory,
    begin: float,
    detail: str = "",
) -> None:
    shop.events.write(
        TrajectoryEvent(
            trajectory=wanted.trajectory(number),
            draw=-1 if wanted.name else wanted.draw,
            task=trajectory.task_id,
            attempt=wanted.attempt,
            cause=trajectory.cause,
            reward=trajectory.reward,
            turns=trajectory.turns,
            tokens=len(trajectory.tokens),
            sampled_tokens=int(trajectory.loss_mask.sum()),
            tries=trajectory.tries,
            detail=detail,
            start=begin,
            end=now(),
        )
    )
