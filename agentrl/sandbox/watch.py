"""Bytes that sandboxes have written to this node's disk, bounded from outside.

For kinds whose file system refuses nothing: what is over the limit is noticed within seconds, all
that runs is ended, and further commands are refused with the reason, as an observation.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from agentrl.sandbox.lease import Lease, descendants, first_inside, kill

log = logging.getLogger(__name__)
INTERVAL_S = 5.0
LEAST_BYTES = 1024
"""What a file counts at least: one without content takes an inode all the same."""


class Watched(Protocol):
    full: str

    def end_commands(self) -> None:
        """End all that runs in it but its executor. Blocking."""

    async def close(self) -> None: ...


W = TypeVar("W", bound=Watched)
Measure = Callable[[Sequence[Lease]], Mapping[str, float]]
"""Returns what sandboxes have written, MiB, by the id of their leases. Blocking. Raises OSError."""


async def watch(
    sandboxes: Mapping[W, Lease],
    measure: Measure,
    *,
    limit_mb: int,
    interval_s: float = INTERVAL_S,
) -> None:
    """Look at all again and again, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        held = {claim.id: one for one, claim in sandboxes.items()}
        try:
            used = await asyncio.to_thread(measure, list(sandboxes.values()))
            for lease_id, written in used.items():
                if written > limit_mb and lease_id in held:
                    await _stop(held[lease_id], written, limit_mb)
        except OSError as error:
            log.warning("bytes written by sandboxes: %s", error)


async def _stop(sandbox: Watched, written: float, limit_mb: int) -> None:
    """End what runs; where it writes on after that, as the node's disk is everybody's, end all."""
    if sandbox.full and written > 2 * limit_mb:
        log.warning("a sandbox goes on writing past its limit, %.0f MiB: closed", written)
        await sandbox.close()
    elif not sandbox.full:
        over = f"{written:.0f} MiB written, over the limit of {limit_mb} MiB"
        sandbox.full = f"{over}: no more commands run here"
        await asyncio.to_thread(sandbox.end_commands)


def written_mb(claims: Sequence[Lease]) -> dict[str, float]:
    """Measure the scratch folders of those that have one."""
    return {claim.id: used_mb(claim.scratch) for claim in claims if claim.scratch}


def used_mb(folder: str) -> float:
    """Return what a folder's files take on the disk, MiB; those that vanish meanwhile are none."""
    used = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                blocks = os.lstat(os.path.join(parent, name)).st_blocks
            except FileNotFoundError:
                continue
            used += max(blocks * 512, LEAST_BYTES)
    return used / (1 << 20)


def end_commands(pid: int) -> None:
    """End all that runs in the sandbox of `pid` but its executor. Raises PermissionError."""
    executors = set(first_inside(pid)) or {pid}
    for executor in executors:
        kill(descendants(executor) - executors)
