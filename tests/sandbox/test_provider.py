"""What a machine cannot do is said at once, and with what to do about it."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from users import NOBODY, as_nobody, needs_root

from agentrl.config import SandboxConfig
from agentrl.errors import ConfigError, SandboxUnavailable
from agentrl.sandbox import limits
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.provider import Provider, open_provider


def opened(kind: str, leases: Path, concurrency: int = 4) -> SandboxProvider:
    return open_provider(SandboxConfig(kind=kind), run="r", leases=leases, concurrency=concurrency)


def test_a_missing_bwrap_names_the_package_and_the_other_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"package `bubblewrap`.*sandbox.kind=process"):
        opened("bubblewrap", tmp_path)


def test_a_bwrap_that_is_refused_repeats_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create.*allow them"):
        opened("bubblewrap", tmp_path)


def test_an_unknown_kind_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bubblewrap, apptainer, .*process"):
        opened("podman", tmp_path)


def test_a_concurrency_past_a_cap_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        SandboxUnavailable, match=r"1000000000 sandboxes at once need .*concurrency"
    ):
        opened("process", tmp_path, concurrency=10**9)


def test_the_soft_limit_on_open_files_is_raised_as_needed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.Limits.derive(20)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted.open_files - 1, hard))
        limits.secure(wanted)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted.open_files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_starts_are_admitted_a_few_at_a_time(box: Any) -> None:
    async def body(provider: Any) -> None:
        starts = [provider.start(box.image, owner=f"0/{n}/0") for n in range(6)]
        sandboxes = await asyncio.gather(*starts)
        done = await asyncio.gather(*(one.exec("echo $$", timeout_s=60) for one in sandboxes))
        assert all(result.exit_code == 0 for result in done)

    box.set(max_starts=2).provider(body)


def test_another_sandbox_for_tests_waits_for_the_same_admission(image: Path, leases: Path) -> None:
    async def main() -> None:
        config, admission = SandboxConfig(kind="process"), Admission(slots=1)
        provider = open_provider(config, run="r", leases=leases, concurrency=4, admission=admission)
        first: Any = await provider.start(image, owner="0/0/0")
        async with admission.turn():
            another = asyncio.ensure_future(first.again())
            await provider.start(image, owner="0/0/1")  # by the turn that is held
            assert not any("(tests)" in path.read_text() for path in leases.iterdir())
        await another
        assert any("(tests)" in path.read_text() for path in leases.iterdir())
        await provider.close()

    asyncio.run(main())


def test_a_host_without_a_system_python_lends_its_own(image: Path, leases: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is missing")
    config = SandboxConfig()

    async def main() -> str:
        backend = Bubblewrap(config, python="/nonexistent/python3")
        admission = Admission.of(config)
        provider = Provider(backend, config, run="r", leases=leases, admission=admission)
        sandbox = await provider.start(image, owner="0/0/0")
        done = await sandbox.exec("python -c 'import sys, json; print(sys.version)'", timeout_s=60)
        await provider.close()
        return done.output

    assert asyncio.run(main()).strip() == sys.version.strip()


@pytest.mark.slow
def test_hundreds_at_once_in_one_loop(bubble: Any) -> None:
    async def body(provider: Any) -> None:
        starts = [provider.start(bubble.image, owner=f"{n}/0/0") for n in range(200)]
        sandboxes = await asyncio.gather(*starts)
        done = await asyncio.gather(*(one.exec("cat a.txt", timeout_s=60) for one in sandboxes))
        assert {result.output for result in done} == {"one\n"}

    bubble.set(start_timeout_s=60.0).provider(body)
    assert list(bubble.leases.iterdir()) == []


ORDINARY = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from agentrl.config import SandboxConfig
from agentrl.sandbox.provider import open_provider

async def main(own, foreign, leases):
    config = SandboxConfig(processes=32)
    provider = open_provider(config, run="r", leases=Path(leases), concurrency=2)
    for image in (own, foreign):
        sandbox = await provider.start(Path(image), owner="0/0/0")
        done = await sandbox.exec("echo two > a.txt; rm -r pkg; cat a.txt; id -u", timeout_s=30)
        print(sandbox.how, done.output.split())
        bomb = await sandbox.exec(":(){ :|:& };: sleep 2", timeout_s=1)
        await sandbox.stop_processes()
        print((await sandbox.exec("echo alive", timeout_s=30)).output.strip())
    await provider.close()

asyncio.run(main(*sys.argv[1:]))
"""


@needs_root
@pytest.mark.slow
def test_an_ordinary_user_gets_the_same(image: Path, open_folder: Path) -> None:
    """An overlay over the user's own image, a copy of one that belongs to another."""
    for name in ("own", "foreign"):
        shutil.copytree(image, open_folder / name, symlinks=True)
    (open_folder / "leases").mkdir()
    for path in (open_folder / "leases", *(open_folder / "own").rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    arguments = [str(open_folder / name) for name in ("own", "foreign", "leases")]
    done = as_nobody(ORDINARY, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "overlay ['two', '0']\nalive\ncopy ['two', '0']\nalive\n"
    assert (open_folder / "foreign" / "testbed" / "a.txt").read_text() == "one\n"
