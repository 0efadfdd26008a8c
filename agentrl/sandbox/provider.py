"""Starting sandboxes on this machine: what it can do, how many start at once, who owns them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.config import SandboxConfig
from agentrl.errors import ConfigError, SandboxStartError
from agentrl.sandbox import lease
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.apptainer import Apptainer
from agentrl.sandbox.base import Repeatable, Sandbox, SandboxProvider
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.docker import Docker
from agentrl.sandbox.e2b import E2B
from agentrl.sandbox.limits import Limits, scratch_folder, secure
from agentrl.sandbox.process import HostProcess
from agentrl.sandbox.resident import in_thread
from agentrl.sandbox.warm import WarmPool
from agentrl.sandbox.watch import Measure, watch

log = logging.getLogger(__name__)


class Started(Repeatable, Protocol):
    """A sandbox that runs on its back end and has still to boot."""

    how: str
    """How its testbed is laid; empty until it has booted."""
    full: str
    """Set by a watch: why no command runs any more."""

    @property
    def pid(self) -> int:
        """Its process on this machine; 0 when there is none."""

    def on_close(self, released: Callable[[bool], Awaitable[None]]) -> None:
        """Have `released` called once, at the end, with whether no process can be left."""

    def end_commands(self) -> None:
        """End all that runs in it but its executor. Blocking."""

    async def boot(self) -> None:
        """Wait until commands can run. Raises SandboxStartError."""


class Backend(Protocol):
    """How one kind of sandbox is started; all that differs between kinds."""

    name: str
    kind: str
    """As a lease says it: empty where the sandbox is a process of this host."""

    @property
    def is_system_writable(self) -> bool:
        """See Repeatable."""

    @property
    def measure(self) -> Measure | None:
        """Return how bytes written are watched; None where a file system bounds them."""

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
    config: SandboxConfig,
    *,
    run: str,
    leases: Path,
    concurrency: int,
    admission: Admission | None = None,
) -> SandboxProvider:
    """Check this machine and return its provider for `concurrency` sandboxes at once.

    What dead owners left, of the run or in the scratch folder, is removed first. admission: the
    caller's, who takes a turn of it for each start: only what it did not ask for waits here.

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
    concurrency += config.warm
    secure(Limits.derive(concurrency, config.kind))
    leases.mkdir(parents=True, exist_ok=True)
    backend = kinds[config.kind](config)  # before a sweep imports E2B's SDK, with a narrow pool
    for line in (*lease.sweep(leases), *lease.sweep_scratch(scratch_folder(config))):
        log.info("swept a sandbox of a dead owner: %s", line)
    return Provider(
        backend,
        config,
        run=run,
        leases=leases,
        admission=admission or Admission.of(config),
        is_admitted=admission is not None,
    )


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
        is_admitted: bool = False,
    ) -> None:
        """is_admitted: who calls `start` has a turn of `admission` already."""
        self.name = backend.name
        self._backend = backend
        self._config = config
        self._run = run
        self._leases = leases
        self._admission = admission
        self._is_admitted = is_admitted
        self._warm: WarmPool[Started] = WarmPool(config.warm, self._start_unasked)
        self._open: dict[Started, lease.Lease] = {}
        self._is_closed = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self, image: Path, *, owner: str) -> Started:
        """Start one; waits for admission first, then start_timeout_s covers create and boot.

        One that is ready already is given at once.
        """
        return await self._get(image, owner, has_turn=self._is_admitted)

    async def close(self) -> None:
        """Close every sandbox started here."""
        self._is_closed = True
        await self._warm.close()
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        if self._watch is not None:
            self._watch.cancel()

    async def _again(self, image: Path, owner: str) -> Sandbox:
        return await self._get(image, f"{owner} (tests)", has_turn=False)

    async def _start_unasked(self, image: Path) -> Started:
        return await self._admitted(image, "ready", has_turn=False)

    async def _get(self, image: Path, owner: str, *, has_turn: bool) -> Started:
        ready = await self._warm.take(image)
        if ready is None:
            return await self._admitted(image, owner, has_turn=has_turn)
        claim = self._open[ready] = replace(self._open[ready], owner=owner)
        self._prime(ready, image, owner)
        try:
            await in_thread(lease.publish, self._leases, claim)
        except BaseException:
            await ready.close()
            raise
        return ready

    async def _admitted(self, image: Path, owner: str, *, has_turn: bool) -> Started:
        limit = self._config.start_timeout_s
        if isinstance(self._backend, Prepares):
            await self._backend.prepare(image)
        async with nullcontext() if has_turn else self._admission.turn():
            if self._is_closed:
                raise SandboxStartError(f"sandbox for {owner}: the provider is closed")
            begin = time.monotonic()
            try:
                async with asyncio.timeout(limit):
                    sandbox = await self._start(image, owner)
            except TimeoutError as error:
                raise SandboxStartError(
                    f"sandbox for {owner} over {image}: not ready within "
                    f"sandbox.start_timeout_s={limit:g}; raise it or lower sandbox.max_starts"
                ) from error
        self._warm.started(time.monotonic() - begin)
        return sandbox

    def _prime(self, sandbox: Started, image: Path, owner: str) -> None:
        sandbox.is_system_writable = self._backend.is_system_writable
        sandbox.again = functools.partial(self._again, image, owner)

    async def _start(self, image: Path, owner: str) -> Started:
        claim = lease.new(run=self._run, owner=owner, kind=self._backend.kind)
        claim = replace(claim, scratch=self._backend.scratch(claim))
        sandbox: Started | None = None
        try:
            # before there is anything: a crash leaves a lease
            await in_thread(lease.publish, self._leases, claim)
            if claim.scratch:
                await in_thread(lease.make_scratch, claim)
            sandbox = await self._backend.create(image, claim)
            claim = replace(claim, pid=sandbox.pid, pid_start=lease.start_time(sandbox.pid))
            self._hold(sandbox, claim)
            self._prime(sandbox, image, owner)
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
        self._open[sandbox] = claim
        sandbox.on_close(functools.partial(self._release, sandbox))
        if self._backend.measure is not None and self._watch is None:
            watching = watch(self._open, self._backend.measure, limit_mb=self._config.disk_mb)
            self._watch = asyncio.ensure_future(watching)

    async def _release(self, sandbox: Started, ended_well: bool) -> None:
        claim = self._open.pop(sandbox)
        # who came to its own end has left nothing; nor has who had booted and needs no scratch, for
        # the kernel ends its namespace with it; a service ends its own. The whole of a busy node's
        # /proc is long to read, at each close
        is_over = ended_well or bool(claim.kind) or (bool(sandbox.how) and not claim.scratch)
        await in_thread(lease.discard if is_over else lease.end, self._leases, claim)
