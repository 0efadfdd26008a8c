"""Starting sandboxes on this machine: what it can do, how many start at once, who owns them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from agentrl.config import SandboxConfig
from agentrl.errors import ConfigError, SandboxStartError
from agentrl.sandbox import lease
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.limits import Limits, secure
from agentrl.sandbox.process import HostProcess
from agentrl.sandbox.resident import ResidentSandbox, Spawn

P = ParamSpec("P")
T = TypeVar("T")


class Backend(Protocol):
    """How one kind of sandbox is started; all that differs between kinds on one host."""

    name: str
    code: bytes
    """The executor, compiled for the Python inside."""

    def scratch(self, claim: lease.Lease) -> str:
        """Return the folder on the host that one sandbox will need; empty for none."""

    def spawn(self, image: Path, claim: lease.Lease) -> Spawn:
        """Return what to run, made ready; in a thread if there is a scratch.

        Raises SandboxStartError.
        """


def open_provider(
    config: SandboxConfig, *, run: str, leases: Path, concurrency: int
) -> SandboxProvider:
    """Check this machine and return its provider for `concurrency` sandboxes at once.

    Raises SandboxUnavailable (no bwrap, no namespaces, a cap too small) or ConfigError.
    """
    kinds: dict[str, Callable[[SandboxConfig], Backend]]
    kinds = {"bubblewrap": Bubblewrap, "process": HostProcess}
    if config.kind not in kinds:
        raise ConfigError(f"sandbox.kind={config.kind!r}: must be one of {', '.join(kinds)}")
    secure(Limits.derive(concurrency))
    leases.mkdir(parents=True, exist_ok=True)
    return Provider(kinds[config.kind](config), config, run=run, leases=leases)


class Provider:
    """Implements SandboxProvider over a Backend."""

    def __init__(self, backend: Backend, config: SandboxConfig, *, run: str, leases: Path) -> None:
        self.name = backend.name
        self._backend = backend
        self._config = config
        self._run = run
        self._leases = leases
        self._slots = asyncio.Semaphore(config.max_starts)
        self._open: set[ResidentSandbox] = set()
        self._is_closed = False

    async def start(self, image: Path, *, owner: str) -> ResidentSandbox:
        """Start one; waits for a slot first, then start_timeout_s covers create and boot."""
        limit = self._config.start_timeout_s
        async with self._slots:
            if self._is_closed:
                raise SandboxStartError(f"sandbox for {owner}: the provider is closed")
            try:
                async with asyncio.timeout(limit):
                    return await self._start(image, owner)
            except TimeoutError as error:
                raise SandboxStartError(
                    f"sandbox for {owner} over {image}: not ready within "
                    f"sandbox.start_timeout_s={limit:g}; raise it or lower sandbox.max_starts"
                ) from error

    async def close(self) -> None:
        """Close every sandbox started here."""
        self._is_closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))

    async def _start(self, image: Path, owner: str) -> ResidentSandbox:
        claim = lease.new(run=self._run, owner=owner)
        claim = replace(claim, scratch=self._backend.scratch(claim))
        sandbox: ResidentSandbox | None = None
        try:
            if (
                claim.scratch
            ):  # before the folder exists: a crash in between leaves a lease to sweep
                await in_thread(lease.publish, self._leases, claim)
            spawn = await self._prepare(image, claim)
            sandbox = ResidentSandbox.create(spawn)
            self._open.add(sandbox)
            started = lease.start_time(sandbox.pid)
            claim = replace(claim, pid=sandbox.pid, pid_start=started)
            sandbox.on_close(functools.partial(self._release, sandbox, claim))
            booting = asyncio.ensure_future(sandbox.boot(self._backend.code))
            try:
                await in_thread(lease.publish, self._leases, claim)
                await booting
            finally:
                booting.cancel()
            if self._is_closed:
                raise SandboxStartError(f"sandbox for {owner}: the provider was closed meanwhile")
        except BaseException:
            await (sandbox.close() if sandbox else in_thread(lease.end, self._leases, claim))
            raise
        return sandbox

    async def _prepare(self, image: Path, claim: lease.Lease) -> Spawn:
        """Only a back end with a scratch has files to copy, which the loop must not wait for."""
        if not claim.scratch:
            return self._backend.spawn(image, claim)
        return await in_thread(self._backend.spawn, image, claim)

    async def _release(self, sandbox: ResidentSandbox, claim: lease.Lease) -> None:
        self._open.discard(sandbox)
        if claim.scratch:  # no namespace ends the processes of a lost executor
            await in_thread(lease.end, self._leases, claim)
        else:
            lease.remove(self._leases, claim)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread and, even when cancelled, leave only once it is done."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
