"""The interface of every sandbox back end (one conformance suite runs against each)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

TESTBED = "/testbed"
"""Where a task's repository is inside a sandbox, and where commands start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """One command's end. A lost sandbox raises SandboxLost; it is never a result."""

    output: str
    """Stdout and stderr interleaved, bounded while read; undecodable bytes are replaced."""
    exit_code: int
    """-1 after a timeout."""
    timed_out: bool
    truncated: bool
    oom: bool
    seconds: float


class Sandbox(Protocol):
    """One trajectory's private machine. `close` is idempotent and never raises."""

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        max_bytes: int = 10_000,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        """Run `command` by a shell in TESTBED, stdin from /dev/null. Raises SandboxLost."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file (relative paths are under TESTBED), making its folders."""

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file's first `max_bytes`. Raises FileNotFoundError."""

    async def stop_processes(self) -> None:
        """End all that commands left running; files stay."""

    async def close(self) -> None: ...


@runtime_checkable
class Repeatable(Sandbox, Protocol):
    """A sandbox of a provider, of which another can be had: tests run there, not in the agent's."""

    is_system_writable: bool
    """Whether commands can change programs and packages outside of the testbed."""
    again: Callable[[], Awaitable[Sandbox]]
    """Starts another over the same image, for the caller to close. Raises SandboxStartError."""


class SandboxProvider(Protocol):
    """A back end on this machine; starts are admitted `max_starts` at a time."""

    name: str

    async def start(self, image: Path, *, owner: str) -> Sandbox:
        """Start one over `image` (a folder whose `testbed` is the repository), left untouched.

        `owner` names the trajectory in the lease. Raises SandboxStartError.
        """

    async def close(self) -> None:
        """Close every sandbox started here."""
