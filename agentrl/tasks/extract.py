"""Brings the repository out of a task's own image: its untouched files are on this host then.

Grading restores tests from them. Its git is left behind: a registry's image may hold later commits.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

from agentrl.errors import TaskError
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.tasks.images import lay_bug, made
from agentrl.tasks.restore import TMP
from agentrl.tasks.task import Task

PART = 16 << 20
"""Bytes of one answer: a sandbox's first process holds it in its own bounded memory."""


async def extract(task: Task, provider: SandboxProvider, *, image: Path, timeout_s: float) -> None:
    """Make `image`/testbed from the environment that the image folder names, unless it is there.

    Raises TaskError, SandboxStartError, SandboxLost.
    """
    if (image / "testbed").is_dir():
        return
    sandbox = await provider.start(image, owner=f"extract {task.instance_id}")
    try:
        packed = await _packed(task, sandbox, timeout_s)
    finally:
        await sandbox.close()
    await asyncio.to_thread(unpack, task, packed, image)


async def _packed(task: Task, sandbox: Sandbox, timeout_s: float) -> bytes:
    """Return the repository without its git, gzipped, read in parts that a sandbox can hold."""
    folder = "/tmp/packed"
    done = await sandbox.exec(
        f"mkdir -p {TMP}/packed && tar --exclude=./.git -czf - . | split -b {PART} - {TMP}/packed/ "
        f"&& ls {TMP}/packed",
        timeout_s=timeout_s,
        max_bytes=1 << 20,
    )
    if done.exit_code:
        raise TaskError(
            f"task {task.instance_id}: its repository can't be packed (exit {done.exit_code}): "
            f"{done.output.strip()[-300:]}"
        )
    names = done.output.split()
    return b"".join([await sandbox.get(f"{folder}/{name}", max_bytes=PART) for name in names])


def unpack(task: Task, packed: bytes, image: Path) -> None:
    """Lay a packed repository and the task's bug into `image`, as one commit."""

    def fill(testbed: Path) -> None:
        testbed.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            tar.extractall(testbed, filter="tar")
        lay_bug(task, testbed)

    made(image, task, fill, with_ignored=False)
