"""Proof in a sandbox that a task can decide: its tests fail before the gold fix, pass after.

And that it decides alike every time, and that its repository does not hold the fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agentrl.config import RunConfig
from agentrl.errors import GradingError, TaskError
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.answer import apply_patch
from agentrl.tasks.extract import extract
from agentrl.tasks.grade import grade, judge
from agentrl.tasks.images import later_commits
from agentrl.tasks.load import image_folder
from agentrl.tasks.task import Task, Verdict
from agentrl.tasks.verifier import run_solution

T_ = TypeVar("T_")


async def validate_all(
    config: RunConfig, tasks: Sequence[Task], told: Callable[[], None] = lambda: None
) -> list[str]:
    """Return what is wrong with those of `tasks` that fail; see `validate_each`."""
    return list((await validate_each(config, tasks, told)).values())


async def validate_each(
    config: RunConfig,
    tasks: Sequence[Task],
    told: Callable[[], None] = lambda: None,
    *,
    repeats: int = 1,
) -> dict[str, str]:
    """Validate `tasks`, rollout.concurrency at a time; return what is wrong, by instance.

    told: called at the end of each. repeats: see `validate`. Raises SandboxUnavailable,
    SandboxStartError, SandboxLost.
    """
    limit = config.tasks.grade_timeout_s

    async def fault(task: Task, provider: SandboxProvider) -> str:
        try:
            image = await asyncio.to_thread(image_folder, config.tasks, task)
            await extract(task, provider, image=image, timeout_s=limit)
            await validate(task, provider, image=image, timeout_s=limit, repeats=repeats)
        except (TaskError, GradingError) as error:
            return str(error)
        return ""

    found = await for_each(config, tasks, fault, told)
    return {task.instance_id: text for task, text in zip(tasks, found, strict=True) if text}


async def for_each(
    config: RunConfig,
    tasks: Sequence[Task],
    body: Callable[[Task, SandboxProvider], Awaitable[T_]],
    told: Callable[[], None] = lambda: None,
) -> list[T_]:
    """Await `body` for each task, rollout.concurrency at a time; return its results in order.

    told: called at the end of each. What a body raises ends all, sandboxes closed.
    """
    leases = Path(config.tasks.folder) / "leases"
    number = config.rollout.concurrency
    slots = asyncio.Semaphore(number)
    provider = open_provider(config.sandbox, run=config.name, leases=leases, concurrency=number)

    async def one(task: Task) -> T_:
        async with slots:
            try:
                return await body(task, provider)
            finally:
                told()

    try:
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(one(task)) for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        await provider.close()
    return [each.result() for each in found]


async def validate(
    task: Task, provider: SandboxProvider, *, image: Path, timeout_s: float, repeats: int = 1
) -> None:
    """Grade `task` with its bug and with its fix. Raises TaskError naming the tests at fault.

    repeats: how many times each is graded; a test that does not say the same each time is flaky.
    """
    later = await asyncio.to_thread(later_commits, image / "testbed")
    if later:
        raise TaskError(
            f"task {task.instance_id}: git in {image / 'testbed'} reaches {later} commits beyond "
            "its own, where a fix may be read; make the image anew without them"
        )
    sandbox = await provider.start(image, owner=f"validate {task.instance_id}")

    async def with_bug() -> Verdict:
        return await judge(task, sandbox, image=image, timeout_s=timeout_s)

    async def with_fix() -> Verdict:
        return await _grade_fixed(task, provider, image, timeout_s)

    try:
        passed, failed, log = await _repeated(task, with_bug, repeats)
    finally:
        await sandbox.close()
    _refuse(task, "pass before any fix", passed & set(task.fail_to_pass))
    _refuse(task, "fail before any fix", failed & set(task.pass_to_pass), log)
    _, failed, log = await _repeated(task, with_fix, repeats)
    _refuse(task, "fail after the gold fix", failed, log)


async def _grade_fixed(
    task: Task, provider: SandboxProvider, image: Path, timeout_s: float
) -> Verdict:
    """Grade the gold fix as an agent's work is graded."""
    sandbox = await provider.start(image, owner=f"validate {task.instance_id}")
    try:
        await apply_gold(task, sandbox, timeout_s=timeout_s)
        return await grade(task, sandbox, image=image, timeout_s=timeout_s)
    finally:
        await sandbox.close()


async def _repeated(
    task: Task, verdict: Callable[[], Awaitable[Verdict]], repeats: int
) -> tuple[set[str], set[str], str]:
    """Return what passed, what failed and the last log. Raises TaskError for what did either."""
    passed: set[str] = set()
    failed: set[str] = set()
    for _ in range(repeats):
        found = await verdict()
        passed |= set(found.passed)
        failed |= set(found.failed)
    _refuse(task, f"are flaky over {repeats} runs", passed & failed)
    return passed, failed, "" if passed else found.log


async def apply_gold(task: Task, sandbox: Sandbox, *, timeout_s: float) -> None:
    """Mend the repository as the task's own fix does. Raises TaskError, SandboxLost."""
    if task.solution:
        done = await run_solution(task, sandbox, timeout_s=timeout_s)
        what = "its solve.sh fails"
    elif task.gold:
        done = await apply_patch(task.gold.encode(), sandbox, timeout_s=timeout_s)
        what = "its gold patch does not apply"
    elif task.patch:
        done = await apply_patch(task.patch.encode(), sandbox, timeout_s=timeout_s, reverse=True)
        what = "its patch does not apply in reverse"
    else:
        raise TaskError(f"task {task.instance_id}: has no fix to validate it with")
    if done.exit_code:
        raise TaskError(f"task {task.instance_id}: {what}: {done.output.strip()[-500:]}")


def _refuse(task: Task, fault: str, tests: set[str], log: str = "") -> None:
    """Raise TaskError if there are `tests`; `log` is told: what ran may be no tests at all."""
    if not tests:
        return
    hint = ""
    if task.network not in ("", "no-network"):
        hint = f" (it asks for the network {task.network!r}, and a sandbox has none)"
    elif task.verifier and task.verifier.is_fresh and "after" in fault:
        hint = " (where a fix is more than changes of the repository: tasks.fresh_verifier=false)"
    said = f"; its tests ended with {log.strip()[-300:]!r}" if log else ""
    raise TaskError(
        f"task {task.instance_id}: {len(tests)} tests {fault}, {', '.join(sorted(tests)[:5])}{hint}"
        f"; drop the row, or mend its image{said}"
    )
