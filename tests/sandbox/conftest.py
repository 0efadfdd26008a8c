"""A provider and a sandbox of either kind, over an image in a folder with an awkward name."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import SandboxConfig
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.provider import open_provider

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is missing")
Body = Callable[[Sandbox], Awaitable[Any]]
ProviderBody = Callable[[SandboxProvider], Awaitable[Any]]


@pytest.fixture
def image(odd_path: Path) -> Path:
    """An image whose testbed has a file, a folder with a file, and a link."""
    testbed = odd_path / "image" / "testbed"
    (testbed / "pkg").mkdir(parents=True)
    (testbed / "a.txt").write_text("one\n")
    (testbed / "pkg" / "mod.py").write_text("x = 1\n")
    (testbed / "link").symlink_to("a.txt")
    return odd_path / "image"


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture(params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "process"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Box:
    """Opens a provider, runs a coroutine with it or with one sandbox of it, closes all."""

    def __init__(self, kind: str, image: Path, leases: Path) -> None:
        self.kind = kind
        self.image = image
        self.leases = leases
        self.config = SandboxConfig(kind=kind)

    def set(self, **keys: Any) -> Box:
        self.config = replace(self.config, **keys)
        return self

    def provider(self, body: ProviderBody) -> Any:
        async def main() -> Any:
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

    def sh(self, command: str, *, timeout_s: float = 20.0, **options: Any) -> Any:
        """Run one command in a sandbox of its own."""
        return self.run(lambda sandbox: sandbox.exec(command, timeout_s=timeout_s, **options))


@pytest.fixture
def box(kind: str, image: Path, leases: Path) -> Box:
    return Box(kind, image, leases)


@pytest.fixture
def bubble(image: Path, leases: Path) -> Box:
    """Isolation is bubblewrap's alone."""
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is missing")
    return Box("bubblewrap", image, leases)
