"""What opens a provider of any kind, and why a kind cannot be opened here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from docker_toys import why_no_docker
from processes import children, is_gone

from agentrl.config import SandboxConfig
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.loopback import Service, serve
from agentrl.sandbox.provider import open_provider

NO_APPTAINER = (
    "apptainer is not on PATH: `sh configs/install_apptainer.sh` as root on Debian, "
    "`dnf install apptainer` (EPEL) or `conda install -c conda-forge apptainer`"
)
NO_E2B = "the E2B SDK is not installed: `pip install 'e2b>=2.6,<3'`"
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is missing")
needs_apptainer = pytest.mark.skipif(shutil.which("apptainer") is None, reason=NO_APPTAINER)
needs_docker = pytest.mark.skipif(bool(why_no_docker()), reason=why_no_docker())
needs_e2b = pytest.mark.skipif(importlib.util.find_spec("e2b") is None, reason=NO_E2B)
BUBBLEWRAP = pytest.param("bubblewrap", marks=needs_bubblewrap)
APPTAINER = pytest.param("apptainer", marks=needs_apptainer)
DOCKER = pytest.param("docker", marks=needs_docker)
E2B = pytest.param("e2b", marks=[needs_e2b, needs_bubblewrap])
PROCESS = pytest.param("process", marks=pytest.mark.slow)  # the suite a second time
Body = Callable[[Sandbox], Awaitable[Any]]
ProviderBody = Callable[[SandboxProvider], Awaitable[Any]]


class Box:
    """Opens a provider, runs a coroutine with it or with one sandbox of it, closes all."""

    def __init__(self, kind: str, image: Path, leases: Path, environment: str = "") -> None:
        self.kind = kind
        self.image = image
        self.leases = leases
        self.config = SandboxConfig(kind=kind, environment=environment)
        self.service: Service | None = None

    def set(self, **keys: Any) -> Box:
        self.config = replace(self.config, **keys)
        return self

    def provider(self, body: ProviderBody) -> Any:
        async def main() -> Any:
            async with loopback(self) if self.kind == "e2b" else nullcontext():
                opened = open_provider(self.config, run="test", leases=self.leases, concurrency=8)
                try:
                    async with asyncio.timeout(120):
                        return await body(opened)
                finally:
                    await opened.close()

        return asyncio.run(main())

    def run(self, body: Body) -> Any:
        async def main(provider: SandboxProvider) -> Any:
            return await body(await provider.start(self.image, owner="0/0/0"))

        return self.provider(main)

    def sh(self, command: str, *, timeout_s: float = 60.0, **options: Any) -> Any:
        """Run one command in a sandbox of its own."""
        return self.run(lambda sandbox: sandbox.exec(command, timeout_s=timeout_s, **options))

    async def lose(self, sandbox: Any) -> None:
        """Take a sandbox away under its owner, as a crash of its host would."""
        if self.service is not None:
            await self.service.end(sandbox.id)
        else:
            os.kill(sandbox.pid, signal.SIGKILL)

    def has_nothing(self) -> bool:
        """Whether no sandbox, lease or process of one is left."""
        machines = self.service.machines if self.service else children()
        return not machines and not any(self.leases.glob("*"))


def sleepers(seconds: str) -> list[psutil.Process]:
    """Return the living processes of this host that sleep for so long, in sandboxes too."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", seconds] and not is_gone(process)
    ]


async def until(happens: Callable[[], object], *, in_thread: bool = False) -> None:
    """Wait for it, two minutes at most. in_thread: it takes so long that others should go on."""
    for _ in range(60_000):
        if await asyncio.to_thread(happens) if in_thread else happens():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


@asynccontextmanager
async def loopback(box: Box) -> AsyncIterator[Service]:
    """Serve E2B's SDK from bubblewrap sandboxes; its address and a key are in the environment."""
    wide: dict[str, Any] = {"processes": 300, "memory_mb": 2048, "total_memory_mb": 0}
    config = SandboxConfig(**wide, file_mb=512, disk_mb=512, cpu_s=600, start_timeout_s=60.0)
    template = box.leases.parent / "template"
    (template / "testbed").mkdir(parents=True, exist_ok=True)
    folder = box.leases.parent / "loopback"
    inner = open_provider(config, run="loopback", leases=folder, concurrency=8)
    try:
        async with serve(inner, template) as box.service:
            os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = box.service.url
            os.environ["E2B_API_KEY"] = "e2b_" + 40 * "0"
            yield box.service
    finally:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
            os.environ.pop(name, None)
        await inner.close()
