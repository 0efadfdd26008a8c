"""Bytes that sandboxes have written to this node's disk, bounded from outside.

For kinds whose file system refuses nothing: what is over the limit is noticed within seconds, all
that runs is ended, and further commands are refused with the reason, as an observation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Protocol, TypeVar

from agentrl.sandbox import lease

INTERVAL_S = 5.0


class Watched(Protocol):
    full: str

    @property
    def pid(self) -> int: ...


W = TypeVar("W", bound=Watched)


async def watch(
    scratches: Mapping[W, str], *, limit_mb: int, interval_s: float = INTERVAL_S
) -> None:
    """Look at every scratch again and again, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        for sandbox, scratch in list(scratches.items()):
            if scratch and not sandbox.full:
                used = await asyncio.to_thread(used_mb, scratch)
                if used > limit_mb:
                    sandbox.full = (
                        f"{used:.0f} MiB written, over the limit of {limit_mb} MiB: "
                        "no more commands run here"
                    )
                    await asyncio.to_thread(end_commands, sandbox.pid)


def used_mb(folder: str) -> float:
    """Return what a folder's files take on the disk, MiB; those that vanish meanwhile are none."""
    blocks = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                blocks += os.lstat(os.path.join(parent, name)).st_blocks
            except FileNotFoundError:
                continue
    return blocks * 512 / (1 << 20)


def end_commands(pid: int) -> None:
    """End all that runs in the sandbox of `pid` but its executor."""
    executors = set(lease.first_inside(pid)) or {pid}
    for executor in executors:
        lease.kill(set(lease.descendants(executor)) - executors)
