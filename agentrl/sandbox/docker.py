"""Docker through docker-py: a container a sandbox, whose first process is the resident executor.

No network of its own for any of them: a host has about 31 to give. The executor reaps what is
orphaned, so no other init is needed, and it ends when its owner's connection does; then the daemon
removes the container. Bounded: what `bubblewrap` bounds and, by cgroup, memory and processes of the
whole; bytes written in all are watched, not refused by the file system (see `watch`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.backoff import random_wait_s
from agentrl.sandbox.environment import VARIABLES, environment_of, executor_source, first_command
from agentrl.sandbox.limits import SPARE_MB, bounds
from agentrl.sandbox.pull import REFUSALS
from agentrl.sandbox.resident import ResidentSandbox, in_thread
from agentrl.sandbox.single import SingleFlight

log = logging.getLogger(__name__)
API_TIMEOUT_S = 60
STILL_MAKING_S = 2.0
POOL = 64
"""Connections to the daemon; each attached sandbox holds one of its own beside them."""


class Docker:
    """Asks this host's daemon for containers; made once, after it has answered."""

    name = kind = "docker"
    is_system_writable = True

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.code = executor_source()
        self._client = open_client()
        self._images: SingleFlight[None] = SingleFlight()

    def scratch(self, claim: lease.Lease) -> str:
        """What is written is in the container's own layer."""
        del claim
        return ""

    def measure(self, claims: Sequence[lease.Lease]) -> dict[str, float]:
        """Return what containers have written, as the daemon counts it. Raises OSError."""
        if not claims:
            return {}
        label = {"label": f"agentrl_run={claims[0].run}"}
        found = self._client.api.containers(size=True, filters=label)
        return {
            one["Labels"][lease.LABEL]: one.get("SizeRw", 0) / (1 << 20)
            for one in found
            if lease.LABEL in one["Labels"]
        }

    async def prepare(self, image: Path) -> None:
        """Have the daemon pull what it has not, asked once. Raises SandboxStartError."""
        reference = environment_of(image, self.config.environment)
        await self._images.get(reference, functools.partial(self._pull, reference))

    def _pull(self, reference: str) -> None:
        api, errors = self._client.api, load_sdk().errors
        deadline, attempt = time.monotonic() + self.config.pull_timeout_s, 0
        while True:
            try:
                api.inspect_image(reference)
                return
            except errors.ImageNotFound:
                attempt += 1
            try:
                api.pull(reference)
            except errors.APIError as error:
                is_refused = any(word in str(error).lower() for word in REFUSALS)
                if not is_refused or time.monotonic() > deadline:
                    raise SandboxStartError(f"docker pull {reference}: {error}") from error
                time.sleep(random_wait_s(attempt))

    async def create(self, image: Path, claim: lease.Lease) -> ResidentSandbox:
        """Create, attach and start one. Raises SandboxStartError in the daemon's words."""
        container = await in_thread(self._create, image, claim)
        return ResidentSandbox(container, code=self.code, places={})

    def _create(self, image: Path, claim: lease.Lease) -> Container:
        reference = environment_of(image, self.config.environment)
        api = self._client.api
        try:
            made = api.create_container(reference, **self._wanted(image, claim))["Id"]
            # attached before it starts, or its first words are lost
            attached = api.attach_socket(
                made, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            )
            api.start(made)
            pid = int(api.inspect_container(made)["State"]["Pid"])
        except Exception as error:  # docker-py's kinds, and those of requests below it
            raise SandboxStartError(f"docker, image {reference}: {error}") from error
        return Container(self._client, made, pid=pid, attached=attached)

    def _wanted(self, image: Path, claim: lease.Lease) -> dict[str, Any]:
        config, testbed = self.config, image / "testbed"
        binds = {}
        if testbed.is_dir():
            binds[str(testbed.resolve())] = {"bind": "/.image", "mode": "ro"}
        host = self._client.api.create_host_config(
            network_mode="none",
            auto_remove=True,
            binds=binds,
            # the executor's watch is to come first: the kernel might end the executor itself
            mem_limit=f"{config.total_memory_mb + SPARE_MB}m" if config.total_memory_mb else None,
            pids_limit=config.processes + 8,
            security_opt=["no-new-privileges"],
        )
        return {
            "command": first_command(0, 1, *bounds(config), shell=config.shell),
            "entrypoint": "",
            "environment": VARIABLES,
            "host_config": host,
            "labels": {lease.LABEL: claim.id, "agentrl_run": claim.run, "agentrl_host": claim.host},
            "stdin_open": True,
            "user": "0",
            "working_dir": "/",
        }


class Container:
    """Implements resident.Host over an attached container."""

    name = "docker"

    def __init__(self, client: Any, made: str, *, pid: int, attached: Any) -> None:
        self._client = client
        self._id = made
        self._pid = pid
        self._attached = attached
        """docker-py's file over the socket; dropped, it would close it."""
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._pid

    async def open(self) -> tuple[StreamReader, StreamWriter]:
        sock = getattr(self._attached, "_sock", self._attached)
        sock.setblocking(False)
        raw, writer = await asyncio.open_connection(sock=sock)
        plain = StreamReader()
        self._pump = asyncio.ensure_future(unmix(raw, plain))
        return plain, writer

    def kill(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._try_to_remove)

    def end_commands(self) -> None:
        """From within: its pids here are those of the daemon's host, which may be another."""
        api = self._client.api
        made = api.exec_create(self._id, ["/bin/sh", "-c", "kill -9 -1"])
        api.exec_start(made["Id"], detach=True)

    def _try_to_remove(self) -> None:
        try:
            remove(self._client, self._id)
        except OSError as error:
            log.warning("docker container %s was not removed: %s", self._id[:12], error)

    async def end(self, timeout_s: float) -> bool:
        """Wait until the daemon closes the stream, and have it remove the container."""
        over = False
        if self._pump is not None:
            over = bool((await asyncio.wait([self._pump], timeout=timeout_s))[0])
            self._pump.cancel()
            if not over:
                log.warning("container %s did not end in %g s: removed", self._id[:12], timeout_s)
        await in_thread(remove, self._client, self._id)
        return over


async def unmix(raw: StreamReader, plain: StreamReader) -> None:
    """Copy a container's output: frames of a stream's number, three zeros and a length before."""
    try:
        while True:
            header = await raw.readexactly(8)
            plain.feed_data(await raw.readexactly(int.from_bytes(header[4:], "big")))
    except (asyncio.IncompleteReadError, ConnectionError):
        plain.feed_eof()


def remove(client: Any, container: str) -> None:
    """Remove a container by force; one that is gone, or is being removed, is none.

    Raises OSError, which docker-py's and requests' errors are.
    """
    try:
        client.api.remove_container(container, force=True, v=True)
    except load_sdk().errors.APIError as error:
        if error.status_code not in (404, 409):
            raise


@functools.cache
def load_sdk() -> ModuleType:
    try:
        return importlib.import_module("docker")
    except ImportError as error:
        raise SandboxUnavailable(
            f"sandbox.kind=docker: {error}; install `pip install 'agentrl-slurm[docker]'`"
        ) from error


def open_client() -> Any:
    """Return a client of the daemon that DOCKER_HOST or the socket names, which answers.

    Raises SandboxUnavailable.
    """
    sdk = load_sdk()
    try:
        client = sdk.from_env(timeout=API_TIMEOUT_S, max_pool_size=POOL)
        client.ping()
    except sdk.errors.DockerException as error:
        raise SandboxUnavailable(
            f"sandbox.kind=docker: no daemon answers: {error}; start dockerd, or ask for "
            "sandbox.kind=apptainer, which needs none"
        ) from error
    return client


def end_by_lease(lease_id: str, *, is_owner_dead: bool = False) -> int:
    """Remove the containers of a lease; return how many there were. Blocking, for a thread.

    is_owner_dead: where there is none it is looked for again, as the daemon may still be making
    what the owner had asked for.
    """
    client = open_client()
    label = {"label": f"{lease.LABEL}={lease_id}"}
    try:
        found = client.api.containers(all=True, filters=label)
        if not found and is_owner_dead:
            time.sleep(STILL_MAKING_S)
            found = client.api.containers(all=True, filters=label)
        for one in found:
            remove(client, one["Id"])
    except OSError as error:
        raise SandboxUnavailable(f"docker, containers of lease {lease_id}: {error}") from error
    finally:
        client.close()
    return len(found)
