"""E2B, cloud or self-hosted, through its own SDK: a microVM a sandbox, a process a command.

Its isolation and its disk are E2B's; memory, CPU time, file size and processes are bounded as in
`bubblewrap`. Commands are root's there, so they can undo what is inside: nothing of the host is.
A sandbox lives `sandbox.lease_s` beyond its owner's last heartbeat.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
import io
import logging
import shlex
import sys
import tarfile
import uuid
from collections.abc import Awaitable, Callable
from inspect import signature
from pathlib import Path
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxLost, SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.backoff import random_wait_s
from agentrl.sandbox.base import TESTBED, ExecResult, Sandbox
from agentrl.sandbox.e2b_sdk import is_refused_for_now, is_slow, is_unanswered, open_sdk
from agentrl.sandbox.e2b_template import ENDING
from agentrl.sandbox.environment import (
    COMPILE,
    ONCE,
    PREPARE,
    VARIABLES,
    environment_of,
    once_source,
)
from agentrl.sandbox.frames import pack, unpack
from agentrl.sandbox.limits import SPARE_MB, Limits, bounds
from agentrl.sandbox.pull import REGISTRY, ensure, shared_folder
from agentrl.sandbox.resident import (
    FILE_TIMEOUT_S,
    MARGIN_S,
    check_reply,
    exec_request,
    exec_result,
    in_thread,
    inside,
    refused,
    unrunnable,
)
from agentrl.sandbox.single import SingleFlight

log = logging.getLogger(__name__)
TARS = 8
"""Repositories that are kept packed: the attempts at one task start together."""
LONGEST_REQUEST = 120_000
"""Bytes of a command line: Linux takes no argument over 128 KiB."""


class E2B:
    """Starts sandboxes through the SDK; made once, before which nothing may import it."""

    name = kind = "e2b"
    is_system_writable = True
    measure = None

    def __init__(self, config: SandboxConfig, *, concurrency: int) -> None:
        self.config = config
        self._sdk = open_sdk(Limits.derive(concurrency).connections)
        self._options = {"domain": config.e2b_domain} if config.e2b_domain else {}
        # an older SDK knows no keys: a create that is asked twice may then leave a second sandbox,
        # which no heartbeat renews
        self._has_keys = "idempotency_key" in signature(self._sdk.AsyncSandbox.create).parameters
        self._templates: SingleFlight[str] = SingleFlight()
        self._unwanted: set[asyncio.Task[None]] = set()

    def scratch(self, claim: lease.Lease) -> str:
        """Nothing of it is on this host."""
        del claim
        return ""

    async def prepare(self, image: Path) -> None:
        """Have the template of a registry's image built, whichever node asks first.

        Raises SandboxStartError in E2B's words.
        """
        reference = environment_of(image, self.config.environment)
        if reference.startswith(REGISTRY):
            await self._templates.get(reference, functools.partial(self._build, reference))

    def _build(self, reference: str) -> str:
        words = [sys.executable, "-P", "-m", "agentrl.sandbox.e2b_template"]
        memory_mb = (self.config.total_memory_mb or self.config.memory_mb) + SPARE_MB
        named = ensure(
            reference,
            shared_folder(self.config.images, reference),
            program=[*words, str(memory_mb + memory_mb % 2), self.config.e2b_domain],
            timeout_s=self.config.pull_timeout_s,
            ending=ENDING,
        )
        return named.read_text().strip()

    async def create(self, image: Path, claim: lease.Lease) -> E2BSandbox:
        """Create one, waiting while the service is busy. Raises SandboxStartError."""
        named = environment_of(image, self.config.environment)
        template = self._templates.made(named) or named
        testbed = image / "testbed"
        upload = await in_thread(tarred, testbed) if testbed.is_dir() else b""
        creating = asyncio.ensure_future(self._create(template, claim))
        try:
            raw = await asyncio.shield(creating)
        except asyncio.CancelledError:  # the service may be half-way: what comes of it is ended
            self._unwanted.add(unwanted := asyncio.ensure_future(discard(creating)))
            unwanted.add_done_callback(self._unwanted.discard)
            raise
        return E2BSandbox(raw, config=self.config, upload=upload)

    async def _create(self, template: str, claim: lease.Lease) -> Any:
        """Ask again under one idempotency key until the provider's deadline cancels this."""
        attempt = 0
        key = {"idempotency_key": claim.id} if self._has_keys else {}
        while True:
            try:
                return await self._sdk.AsyncSandbox.create(
                    template,
                    timeout=int(self.config.lease_s),
                    metadata={lease.LABEL: claim.id, "agentrl_run": claim.run},
                    envs=VARIABLES,
                    allow_internet_access=False,
                    **key,
                    **self._options,
                )
            except Exception as error:  # the SDK's kinds have no root of their own
                said = f"E2B template {template}: {type(error).__name__}: {error}"
                if not (is_refused_for_now(error) or (key and is_unanswered(error))):
                    raise SandboxStartError(said) from error
                log.warning("asked again: %s", said)
            attempt += 1
            await asyncio.sleep(random_wait_s(attempt))


class E2BSandbox:
    """Implements Sandbox: each request is one process of the executor there."""

    pid = 0
    full = ""
    is_system_writable = True
    again: Callable[[], Awaitable[Sandbox]]

    def __init__(self, raw: Any, *, config: SandboxConfig, upload: bytes) -> None:
        self.id: str = raw.sandbox_id
        self.how = "copy" if upload else "image"
        self._raw = raw
        self._upload = upload
        self._turn = asyncio.Lock()
        self._lost = ""
        self._folder = f"/tmp/.agentrl-{uuid.uuid4().hex}"
        self._lease_s = config.lease_s
        self._words = [self._folder, config.shell, *map(str, bounds(config))]
        """The executor's command, once its Python is known."""
        self._heart: asyncio.Task[None] | None = None
        self._released: Callable[[bool], Awaitable[None]] | None = None
        self._closing: asyncio.Task[None] | None = None

    def on_close(self, released: Callable[[bool], Awaitable[None]]) -> None:
        self._released = released

    def end_commands(self) -> None:
        """What it writes is bounded by its machine, so nobody asks."""

    async def boot(self) -> None:
        """Bring the executor and the testbed. Raises SandboxStartError."""
        self._heart = asyncio.ensure_future(self._beat())
        parts, code, tar = (f"{self._folder}/{name}" for name in ("parts", "code", "tar"))
        words = ["/bin/sh", "-c", PREPARE, COMPILE, parts, code]
        unpack_it = f"mkdir -p {TESTBED} && tar -C {TESTBED} -xzf {tar} && rm {tar} && "
        try:
            await self._raw.files.write(parts, once_source(), user="root")
            if self._upload:
                await self._raw.files.write(tar, self._upload, user="root")
            command = (unpack_it if self._upload else f"cd {TESTBED} && ") + shlex.join(words)
            done = await self._run(command, FILE_TIMEOUT_S)
        except Exception as error:  # the SDK's kinds have no root of their own
            said = f"{getattr(error, 'stdout', '')}{getattr(error, 'stderr', '')}".strip()
            detail = f"{error}{said[-300:]}".strip()
            raise SandboxStartError(f"E2B sandbox {self.id}: {detail}") from error
        self._upload = b""
        self._words = [done.stdout.split()[-1], "-I", "-S", "-c", ONCE, code, *self._words]

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        max_bytes: int = 10_000,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        """Run `command`; see `Sandbox.exec`. A command past its time is no lost sandbox."""
        if why := unrunnable(command):
            return refused(why)
        wanted = {**VARIABLES, **(env or {})}
        request = exec_request(command, timeout_s=timeout_s, max_bytes=max_bytes, env=wanted)
        encoded = binascii.b2a_base64(pack(request)[4:], newline=False).decode()
        if len(encoded) > LONGEST_REQUEST:
            return refused("cannot start a shell: Argument list too long")
        reply = await self._ask(encoded, timeout_s + MARGIN_S)
        return exec_result(reply) if reply else past_its_time(timeout_s)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.put`. Raises OSError, SandboxLost."""
        name = f"{self._folder}/{uuid.uuid4().hex}"
        async with self._turn:
            await self._call(lambda: self._raw.files.write(name, data, user="root"))
        await self._must(path, b"take", inside(path, {}), name.encode())

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file; see `Sandbox.get`. Raises FileNotFoundError, OSError, SandboxLost."""
        return (await self._must(path, b"get", inside(path, {}), b"%d" % max_bytes))[1]

    async def stop_processes(self) -> None:
        """End all that commands left running; files stay. Raises SandboxLost."""
        await self._must("stop_processes", b"stop")

    async def close(self) -> None:
        """End it; idempotent, finishes even when cancelled, never raises."""
        if self._closing is None:
            self._lost = self._lost or "it was closed"
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        try:
            await self._raw.kill()
        except Exception as error:  # its lease ends it; the record stays for a sweep
            log.warning("E2B sandbox %s was not ended: %s", self.id, error)
            return
        if self._released is not None:
            await self._released(True)

    async def _beat(self) -> None:
        """Push the sandbox's end away three times a lease; what fails is tried at the next beat."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._raw.set_timeout(int(self._lease_s))
            except Exception as error:
                log.warning("E2B sandbox %s: its lease was not renewed: %s", self.id, error)

    async def _must(self, what: str, *request: bytes) -> list[bytes]:
        """Return the reply to a request of files. Raises OSError, SandboxLost."""
        encoded = binascii.b2a_base64(pack(list(request))[4:], newline=False).decode()
        reply = await self._ask(encoded, FILE_TIMEOUT_S)
        if reply is None:
            raise self._lose(f"no answer within {FILE_TIMEOUT_S:.0f} s")
        check_reply(reply, what)
        return reply

    async def _ask(self, encoded: str, deadline_s: float) -> list[bytes] | None:
        """Run one request; None when its process ran out of time in a sandbox that lives."""
        command = shlex.join([*self._words, encoded])
        async with self._turn:
            done = await self._call(lambda: self._run(command, deadline_s))
        if done is None:
            return None
        try:
            return unpack(binascii.a2b_base64(done.stdout.rsplit("\n", 2)[-2]))
        except (IndexError, binascii.Error) as error:
            said = (done.stderr or done.stdout)[-300:]
            raise self._lose(f"its executor said {said!r}") from error

    async def _run(self, command: str, timeout_s: float) -> Any:
        wait_s = timeout_s + MARGIN_S
        return await self._raw.commands.run(
            command, user="root", cwd="/", timeout=timeout_s, request_timeout=wait_s
        )

    async def _call(self, calling: Callable[[], Awaitable[Any]]) -> Any:
        """Await the SDK; None for a process past its time. Raises SandboxLost."""
        if self._lost:
            raise SandboxLost(f"E2B sandbox {self.id} is gone: {self._lost}")
        try:
            return await calling()
        except asyncio.CancelledError:
            self._lost = self._lost or "a request was cancelled half-way"
            raise
        except Exception as error:  # the SDK's kinds have no root of their own
            if type(error).__name__ == "CommandExitException":
                return error
            if is_slow(error) and await self._lives():
                return None
            raise self._lose(f"{type(error).__name__}: {error}") from error

    async def _lives(self) -> bool:
        try:
            return bool(await self._raw.is_running())
        except Exception as error:
            log.info("E2B sandbox %s does not answer: %s", self.id, error)
            return False

    def _lose(self, why: str) -> SandboxLost:
        self._lost = why
        return SandboxLost(f"E2B sandbox {self.id} is gone: {why}")


async def discard(creating: asyncio.Future[Any]) -> None:
    """End a sandbox that nobody waits for any more, once there is one."""
    try:
        async with asyncio.timeout(FILE_TIMEOUT_S):
            await (await creating).kill()
    except Exception as error:  # its lease ends it
        log.info("an unwanted E2B sandbox was not there to end: %s", error)


def past_its_time(seconds: float) -> ExecResult:
    """Return the end of a command whose own executor did not end it in time."""
    return ExecResult(
        output="", exit_code=-1, timed_out=True, truncated=False, oom=False, seconds=seconds
    )


@functools.lru_cache(maxsize=TARS)
def tarred(folder: Path) -> bytes:
    """Return a folder's content as a tar, gzipped."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, arcname=".")
    return data.getvalue()


def end_by_lease(lease_id: str) -> int:
    """Kill the sandboxes of a lease; return how many there were. Blocking, for a thread."""
    sdk = open_sdk(1)
    ended = 0
    try:
        pages = sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={lease.LABEL: lease_id}))
        while pages.has_next:
            for one in pages.next_items():
                ended += bool(sdk.Sandbox.kill(one.sandbox_id))
    except Exception as error:  # the SDK's kinds have no root of their own
        raise SandboxUnavailable(f"E2B, sandboxes of lease {lease_id}: {error}") from error
    return ended
