"""How a worker hands its groups to the trainer: by the shared spool, or by socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from agentrl.config import RunConfig
from agentrl.events import Writer
from agentrl.handoff.socket_sender import SocketSender
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group


class GroupSender(Protocol):
    """What a worker needs of a transport."""

    @property
    def is_full(self) -> bool:
        """Whether so many groups wait for the trainer that no draw should start."""

    async def write(self, group: Group) -> None:
        """Return once `group` is durable where the trainer finds it."""


class FileSender:
    """Writes to the spool on the shared filesystem, which never says that it is full for now."""

    is_full = False

    def __init__(self, spool: Path, node: int) -> None:
        self._writer = SpoolWriter(spool, node)

    async def write(self, group: Group) -> None:
        """Publish it in a thread. Raises OSError (a full disk, …)."""
        await asyncio.to_thread(self._writer.write, group)


@asynccontextmanager
async def open_sender(
    config: RunConfig, run_dir: Path, *, node: int, attempt: int, events: Writer
) -> AsyncIterator[GroupSender]:
    """Give the transport that the config names; its end hands on what it can in half of grace_s."""
    if config.handoff == "files":
        yield FileSender(run_dir / "spool", node)
        return
    async with SocketSender(
        attempt_dir=run_dir / "attempts" / f"{attempt:04d}",
        run=run_dir.name,
        attempt=attempt,
        node=node,
        events=events,
        limit_s=config.training.wait_timeout_s,
        flush_s=config.grace_s / 2,
    ) as sender:
        yield sender
