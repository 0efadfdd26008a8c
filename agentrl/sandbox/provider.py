"""Starting sandboxes on this machine: what it can do, how many start at once, who owns them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.config import SandboxConfig
from agentrl.errors import ConfigError, SandboxStartError
from agentrl.sandbox import lease
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.apptainer import Apptainer
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.docker import Docker
from agentrl.sandbox.e2b import E2B
from agentrl.sandbox.limits import Limits, scratch_folder, secure
from agentrl.sandbox.process import HostProcess
from agentrl.sandbox.resident import in_thread
from agentrl.sandbox.watch import watch

log = logging.getLogger(__name__)


class Started(Sandbox, Protocol):
    """A sandbox that runs on its back end and has still to boot."""

    full: str
    """Set by a watch: why no command runs any more."""

    @property
    def pid(self) -> int:
        """Its process on this machine; 0 when there is none."""

    def on_close(self, released: Callable[[], Awaitable[None]]) -> None:
        """Have `released` called once, when it has ended."""

    async def boot(self) -> None:
        """Wait until commands can run. Raises SandboxStartError."""


class Backend(Protocol):
    """How one kind of sandbox is started; all that differs between kinds."""

    name: str
    kind: str
    """As a lease says it: empty where the sandbox is a process of this host."""

    def scratch(self, claim: lease.Lease) -> str:
        """Return the folder on the host that one sandbox will need; empty for none."""

    async def create(self, image: Path, claim: lease.Lease) -> Started:
        """Start one over `image`; its scratch is there. Raises SandboxStartError."""


@runtime_checkable
class Prepares(Protocol):
    """A back end that may have to fetch images first."""

    async def prepare(self, image: Path) -> None:
        """Bring here what `image` starts from, which is not part of a start's time."""


def open_provider(
    config: SandboxConfig, *, run: str, leases: Path, concurrency: int, is_admitted: bool = False
) -> SandboxProvider:
    """Check this machine and return its provider for `concurrency` sandboxes at once.

    What dead owners left in the scratch folder is removed first. is_admitted: the caller has an
    Admission of its own, so starts here are not held back again.

    Raises SandboxUnavailable (no bwrap, no namespaces, a cap too small) or ConfigError.
    """
    kinds: dict[str, Callable[[SandboxConfig], Backend]]
    kinds = {
        "bubblewrap": Bubblewrap,
        "apptainer": Apptainer,
        "docker": Docker,
        "e2b": functools.partial(E2B, concurrency=concurrency),
        "process": HostProcess,
    }
    if config.kind not in kinds:
        raise ConfigError(f"sandbox.kind={config.kind!r}: must be one of {', '.join(kinds)}")
    secure(Limits.derive(concurrency, config.kind))
    leases.mkdir(parents=True, exist_ok=True)
    for line in lease.sweep_scratch(scratch_folder(config)):
        log.info("swept a sandbox of a dead owner: %s", line)
    admission = Admission(slots=max(concurrency, 1)) if is_admitted else Admission.of(config)
    backend = kinds[config.kind](config)
    return Provider(backend, config, run=run, leases=leases, admission=admission)


class Provider:
    """Implements SandboxProvider over a Backend."""

    def __init__(
        self,
        backend: Backend,
        config: SandboxConfig,
        *,
        run: str,
        leases: Path,
        admission: Admission,
    ) -> None:
        self.name = backend.name
        self._backend = backend
        self._config = config
        self._run = run
        self._leases = leases
        self._admission = admission
        self._open: dict[Started, str] = {}
        """Each sandbox and its scratch."""
        self._is_closed = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self, image: Path, *, owner: str) -> Started:
        """Start one; waits for admission first, then start_timeout_s covers create and boot."""
        limit = self._config.start_timeout_s
        if isinstance(self._backend, Prepares):
            await self._backend.prepare(image)
        async with self._admission.turn():
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
        if self._watch is not None:
            self._watch.cancel()

    async def _start(self, image: Path, owner: str) -> Started:
        claim = lease.new(run=self._run, owner=owner, kind=self._backend.kind)
        claim = replace(claim, scratch=self._backend.scratch(claim))
        sandbox: Started | None = None
        try:
            if claim.scratch or claim.kind:  # before there is anything: a crash leaves a lease
                await in_thread(lease.publish, self._leases, claim)
            if claim.scratch:
                await in_thread(lease.make_scratch, claim)
            sandbox = await self._backend.create(image, claim)
            claim = replace(claim, pid=sandbox.pid, pid_start=lease.start_time(sandbox.pid))
            self._hold(sandbox, claim)
            booting = asyncio.ensure_future(sandbox.boot())
            try:
                await in_thread(lease.publish, self._leases, claim)
                await booting
            finally:
                booting.cancel()
            if self._is_closed:
                raise SandboxStartError(f"sandbox for {owner}: the provider was closed meanwhile")
        except BaseException:
            await (sandbox.close() if sandbox else self._abandon(claim))
            raise
        return sandbox

    async def _abandon(self, claim: lease.Lease) -> None:
        """End what there may be of a sandbox that did not come to be."""
        try:
            await in_thread(lease.end, self._leases, claim)
        except Exception as error:  # of a service that does not answer: its own kinds
            log.warning("sandbox for %s: left for `agentrl sweep`: %s", claim.owner, error)

    def _hold(self, sandbox: Started, claim: lease.Lease) -> None:
        self._open[sandbox] = claim.scratch
        sandbox.on_close(functools.partial(self._release, sandbox, claim))
        if claim.scratch and self._watch is None:
            watching = watch(self._open, limit_mb=self._config.disk_mb)
            self._watch = asyncio.ensure_future(watching)

    async def _release(self, sandbox: Started, claim: lease.Lease) -> None:
        self._open.pop(sandbox, None)
        if claim.scratch:  # no namespace ends the processes of a lost executor
            await in_thread(lease.end, self._leases, claim)
        else:
            lease.remove(self._leases, claim)
