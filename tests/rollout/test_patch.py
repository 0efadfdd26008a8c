"""The patch of a trajectory's record, whatever bytes the repository holds."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_toys import task

from agentrl.config import SandboxConfig
from agentrl.rollout.patch import take_patch
from agentrl.sandbox.provider import open_provider

BEFORE = b"# na\xefve, of 1999\nx = 1\n"
AFTER = "printf '# na\\357ve, of 1999\\nx = \\351\\n' > mod.py"


def git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *who, *words]
    return subprocess.run(command, cwd=folder, input=given, check=True, capture_output=True).stdout


@pytest.fixture
def image(odd_path: Path) -> Path:
    (testbed := odd_path / "testbed").mkdir()
    (testbed / "mod.py").write_bytes(BEFORE)
    (testbed / ".gitattributes").write_text("*.py diff\n")  # text, says the repository
    git(testbed, "init", "-q")
    git(testbed, "add", "-A")
    git(testbed, "commit", "-qm", "one")
    return odd_path


def patch_of(command: str, image: Path) -> str:
    async def main() -> str:
        config = SandboxConfig(kind="process")
        leases = image / "leases"
        provider = open_provider(config, run="r", leases=leases, concurrency=1)
        sandbox = await provider.start(image, owner="0/0/0")
        await sandbox.exec(command, timeout_s=60)
        made = await take_patch(replace(task(), test_files=()), sandbox, image)
        await provider.close()
        return made

    return asyncio.run(main())


def test_a_patch_of_latin_1_gives_the_agents_bytes_again(image: Path) -> None:
    patch = patch_of(f"{AFTER}; printf '\\377' > $(printf 'n\\351w'); echo new > b.txt", image)
    git(image / "testbed", "apply", given=patch.encode("ascii"))
    assert (image / "testbed/mod.py").read_bytes() == BEFORE.replace(b"1\n", b"\xe9\n")
    assert (image / "testbed/b.txt").read_bytes() == b"new\n"
    assert b"n\xe9w" in os.listdir(bytes(image / "testbed"))


def test_a_patch_of_utf_8_is_to_be_read(image: Path) -> None:
    patch = patch_of("echo 'y = \"\u00e9\"' > b.py", image)
    assert '+y = "\u00e9"' in patch.splitlines()
