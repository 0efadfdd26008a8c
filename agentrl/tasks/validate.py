"""Proof in a sandbox that a task can decide: its tests fail before the gold fix, pass after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import GradingError, TaskError
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.lease import sweep
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.grade import grade
from agentrl.tasks.load import image_folder
from agentrl.tasks.task import Task


async def validate_all(
    config: RunConfig, tasks: Sequence[Task], told: Callable[[], None] = lambda: None
) -> list[str]:
    """Validate `tasks`, rollout.concurrency at a time; return what is wrong with those that fail.

    told: called at the end of each. Raises SandboxUnavailable, SandboxStartError, SandboxLost.
    """
    leases = Path(config.tasks.folder) / "leases"
    sweep(leases)
    slots = asyncio.Semaphore(config.rollout.concurrency)
    provider = open_provider(
        config.sandbox, run=config.name, leases=leases, concurrency=config.rollout.concurrency
    )

    async def fault(task: Task) -> str:
        async with slots:
            try:
                image = await asyncio.to_thread(image_folder, config.tasks, task)
                await validate(task, provider, image=image, timeout_s=config.tasks.grade_timeout_s)
            except (TaskError, GradingError) as error:
                return str(error)
            finally:
                told()
        return ""

    try:
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(fault(task)) for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        await provider.close()
    return [one.result() for one in found if one.result()]


async def validate(task: Task, provider: SandboxProvider, *, image: Path, timeout_s: float) -> None:
    """Grade `task` with its bug and with its fix. Raises TaskError naming the tests at fault."""
    sandbox = await provider.start(image, owner=f"validate {task.instance_id}")
    try:
        before = await grade(task, sandbox, image=image, timeout_s=timeout_s)
        _refuse(task, "pass before any fix", set(before.passed) & set(task.fail_to_pass))
        _refuse(task, "fail before any fix", set(before.failed) & set(task.pass_to_pass))
        await _fix(task, sandbox, timeout_s)
        after = await grade(task, sandbox, image=image, timeout_s=timeout_s)
        _refuse(task, "fail after the gold fix", set(after.failed))
    finally:
        await sandbox.close()


async def _fix(task: Task, sandbox: Sandbox, timeout_s: float) -> None:
    await sandbox.put("/tmp/bug.patch", task.patch.encode())
    done = await sandbox.exec("git apply --reverse /tmp/bug.patch", timeout_s=timeout_s)
    if done.exit_code:
        raise TaskError(
            f"task {task.instance_id}: its patch does not apply in reverse: {done.output.strip()}"
        )


def _refuse(task: Task, fault: str, tests: set[str]) -> None:
    if tests:
        raise TaskError(
            f"task {task.instance_id}: {len(tests)} tests {fault}, {', '.join(sorted(tests)[:5])}; "
            "drop the row, or mend its image"
        )
