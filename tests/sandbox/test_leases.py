"""What a crash leaves, and that a sweep ends it and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.sandbox import lease
from agentrl.sandbox.base import SandboxProvider

SECONDS = str(100_000 + os.getpid())
"""How long the sleeps of these tests last: also what tells them from those of another run."""
OWNER = """
import asyncio, sys
from pathlib import Path
from agentrl.config import SandboxConfig
from agentrl.sandbox.provider import open_provider

async def main(kind, image, leases, seconds):
    provider = open_provider(
        SandboxConfig(kind=kind), run="killed", leases=Path(leases), concurrency=2
    )
    sandboxes = [await provider.start(Path(image), owner=f"7/{n}/0") for n in range(2)]
    for sandbox in sandboxes:
        await sandbox.exec(f"setsid sleep {seconds} & sleep {seconds} &", timeout_s=30)
    print("ready", flush=True)
    await sandboxes[0].exec(f"sleep {seconds}", timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


def sleepers() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", SECONDS] and process.status() != "zombie"
    ]


def gone_soon() -> bool:
    """A pid namespace is torn down by the kernel, in its own time."""
    return psutil.wait_procs(sleepers(), timeout=5)[1] == []


def test_a_sweep_after_sigkill_of_the_owner_leaves_nothing(box: Any) -> None:
    argv = [sys.executable, "-c", OWNER, box.kind, str(box.image), str(box.leases), SECONDS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            assert len(list(box.leases.glob("*.json"))) == 2
            assert sleepers()
            assert lease.sweep(box.leases) == []
        finally:
            owner.kill()
    scratch = [json.loads(path.read_text())["scratch"] for path in box.leases.glob("*.json")]
    removed = lease.sweep(box.leases)
    assert len(removed) == 2
    assert "run killed" in removed[0]
    assert list(box.leases.iterdir()) == []
    assert gone_soon()
    assert not any(folder and Path(folder).exists() for folder in scratch)


def test_a_lost_executor_on_the_host_leaves_no_process_after_close(image: Path, box: Any) -> None:
    async def body(sandbox: Any) -> None:
        await sandbox.exec(f"setsid sleep {SECONDS} & setsid sleep {SECONDS} &", timeout_s=30)
        os.kill(sandbox.pid, signal.SIGKILL)
        await sandbox.close()
        assert await asyncio.to_thread(gone_soon)

    box.run(body)


def test_a_lease_names_run_owner_and_processes(box: Any) -> None:
    async def body(provider: SandboxProvider) -> dict[str, Any]:
        sandbox: Any = await provider.start(box.image, owner="3/1/0")
        (path,) = box.leases.glob("*.json")
        return {**json.loads(path.read_text()), "found": sandbox.pid}

    told = box.provider(body)
    assert (told["run"], told["owner"], told["owner_pid"]) == ("test", "3/1/0", os.getpid())
    assert told["pid"] == told["found"]
    assert told["owner_start"] == lease.start_time(os.getpid())


@pytest.fixture
def sleeper() -> Any:
    with subprocess.Popen(["sleep", "94322"]) as process:
        yield process
        process.kill()


def claim(**changes: Any) -> lease.Lease:
    return replace(lease.new(run="r", owner="0/0/0"), **changes)


def test_a_pid_given_again_to_another_process_is_spared(leases: Path, sleeper: Any) -> None:
    lease.publish(leases, claim(owner_start=1, pid=sleeper.pid, pid_start=1))
    assert len(lease.sweep(leases)) == 1
    assert sleeper.poll() is None


def test_a_process_of_a_dead_owner_is_ended(leases: Path, sleeper: Any) -> None:
    started = lease.start_time(sleeper.pid)
    lease.publish(leases, claim(owner_start=1, pid=sleeper.pid, pid_start=started))
    assert "1 processes ended" in lease.sweep(leases)[0]
    assert sleeper.wait(5) == -signal.SIGKILL


def test_leases_of_other_hosts_and_of_the_living_are_kept(leases: Path) -> None:
    lease.publish(leases, claim())
    lease.publish(leases, claim(host="elsewhere/boot", owner_start=1))
    assert lease.sweep(leases) == []


def test_leases_before_a_reboot_and_expired_ones_of_other_hosts_are_removed(leases: Path) -> None:
    name = lease.host_id().partition("/")[0]
    lease.publish(leases, claim(host=f"{name}/an-earlier-boot"))
    lease.publish(leases, claim(host="elsewhere/boot", expires=1.0))
    assert len(lease.sweep(leases)) == 2


def test_a_file_that_is_no_lease_is_left_alone(leases: Path) -> None:
    leases.mkdir()
    (leases / "torn.json").write_text('{"run": ')
    assert lease.sweep(leases) == []
    assert (leases / "torn.json").exists()


def test_a_missing_folder_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert lease.sweep(tmp_path / "none") == []


def test_removing_a_scratch_touches_nothing_beside_it(leases: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    scratch = tmp_path / "agentrl_lease-x"
    (scratch / "shut").mkdir(parents=True)
    (scratch / "shut" / "file").write_text("")
    (scratch / "link").symlink_to(outside)
    (scratch / "shut").chmod(0o500)
    modes = {folder: folder.stat().st_mode for folder in (tmp_path, outside)}
    for _ in range(2):  # the second time there is no such folder
        lease.publish(leases, claim(owner_start=1, scratch=str(scratch)))
        assert len(lease.sweep(leases)) == 1
    assert not scratch.exists()
    assert {folder: folder.stat().st_mode for folder in modes} == modes


def test_a_folder_that_is_no_scratch_is_never_removed(leases: Path, tmp_path: Path) -> None:
    lease.publish(leases, claim(owner_start=1, scratch=str(tmp_path)))
    assert len(lease.sweep(leases)) == 1
    assert tmp_path.exists()
