"""What a crash leaves, and that a sweep ends it and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from boxes import loopback, sleepers, until
from processes import children

from agentrl.config import SandboxConfig
from agentrl.sandbox import cgroups, lease
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.docker import open_client
from agentrl.sandbox.provider import open_provider

SECONDS = str(100_000 + os.getpid())
"""How long the sleeps of these tests last: also what tells them from those of another run."""
OWNER = """
import asyncio, json, sys
from pathlib import Path
from agentrl.config import SandboxConfig
from agentrl.sandbox.provider import open_provider

async def main(image, leases, seconds, keys):
    config = SandboxConfig(**json.loads(keys))
    provider = open_provider(config, run="killed", leases=Path(leases), concurrency=2)
    sandboxes = [await provider.start(Path(image), owner=f"7/{n}/0") for n in range(2)]
    for sandbox in sandboxes:
        await sandbox.exec(f"setsid sleep {seconds} & sleep {seconds} &", timeout_s=30)
    print("ready", flush=True)
    await sandboxes[0].exec(f"sleep {seconds}", timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


class Owner:
    """A process that starts sandboxes of a box's kind, to be killed."""

    def __init__(self, box: Any, folder: Path) -> None:
        self.box = box
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        # an E2B sandbox that was still being made ends by its own lease
        keys = {"kind": box.kind, "environment": box.config.environment, "lease_s": 15.0}
        keys |= {"scratch": str(self.scratch), "start_timeout_s": 120.0}
        words = [str(box.image), str(box.leases), SECONDS, json.dumps(keys)]
        argv = [sys.executable, "-c", OWNER, *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)

    def has_leased(self) -> bool:
        return any(self.box.leases.glob("*.json"))

    def has_begun(self) -> bool:
        """Whether a process of a sandbox, or what a service holds, is there."""
        return bool(children(self.process.pid) or self.at_service())

    def is_ready(self) -> bool:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        return True

    def at_service(self) -> list[Any]:
        if self.box.kind == "docker":
            label = {"label": "agentrl_run=killed"}
            return list(open_client().api.containers(all=True, filters=label))
        return list(self.box.service.machines) if self.box.service else []

    def age(self) -> None:
        """Make old what the owner was writing when it was killed: young, it may be another's."""
        for path in [*self.box.leases.glob("*.tmp"), *self.scratch.iterdir()]:
            os.utime(path, (1, 1))

    def has_left_nothing(self) -> bool:
        files = [*self.box.leases.iterdir(), *self.scratch.iterdir()]
        return not files and not self.at_service() and not sleepers(SECONDS)


@pytest.mark.parametrize("moment", ["has_leased", "has_begun", "is_ready"])
def test_a_sweep_after_sigkill_of_the_owner_leaves_nothing(
    box: Any, moment: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with loopback(box) if box.kind == "e2b" else nullcontext():
            owner = Owner(box, tmp_path)
            try:
                await until(getattr(owner, moment), in_thread=True)
                assert lease.sweep(box.leases) == []
            finally:
                owner.process.kill()
                await asyncio.to_thread(owner.process.communicate)
            owner.age()
            await asyncio.to_thread(lease.sweep, box.leases)
            await asyncio.to_thread(lease.sweep_scratch, owner.scratch)
            await until(owner.has_left_nothing, in_thread=True)

    asyncio.run(main())


SLOW_BWRAP = """#!{python}
import fcntl, os, sys
words = sys.argv[1:]
if "/.image" in words:  # a sandbox: the first bwrap has a word to say to a full pipe first
    reader, writer = os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)))
    os.set_inheritable(reader, True)
    os.set_inheritable(writer, True)
    words = ["--info-fd", str(writer), *words]
os.execv({bwrap!r}, ["bwrap", *words])
"""


@pytest.fixture
def slow_bubble(bubble: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A box whose bwrap never gets to tell the child that it has made to go on."""
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(SLOW_BWRAP.format(python=sys.executable, bwrap=shutil.which("bwrap")))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    return bubble


def halves(box: Any) -> list[int]:
    """Return the pids of bwrap and of the child that it has made, once there are both."""
    ids = [path.stem for path in box.leases.glob("*.json")]
    found = [pid for one in ids for pid in lease.marked(one)]
    if len(found) < 2:
        return []
    return sorted(found, key=lambda pid: len(psutil.Process(pid).parents()))


def test_what_bwrap_leaves_where_its_owner_dies_as_it_starts_is_swept(
    slow_bubble: Any, tmp_path: Path
) -> None:
    async def main() -> list[int]:
        owner = Owner(slow_bubble, tmp_path)
        try:
            await until(lambda: halves(slow_bubble), in_thread=True)
            pids = halves(slow_bubble)
        finally:
            owner.process.kill()
            await asyncio.to_thread(owner.process.communicate)
        return pids

    pids = asyncio.run(main())
    assert lease.start_time(pids[1])  # it would wait for ever
    assert len(lease.sweep(slow_bubble.leases)) >= 1
    assert [lease.start_time(pid) for pid in pids] == [0, 0]


def test_what_bwrap_leaves_where_it_is_killed_as_it_starts_is_ended(slow_bubble: Any) -> None:
    async def body(provider: SandboxProvider) -> list[int]:
        starting = asyncio.create_task(provider.start(slow_bubble.image, owner="0/0/0"))
        await until(lambda: halves(slow_bubble), in_thread=True)
        pids = halves(slow_bubble)
        os.kill(pids[0], signal.SIGKILL)
        starting.cancel()
        await asyncio.wait({starting})
        return pids

    pids = slow_bubble.provider(body)
    assert [lease.start_time(pid) for pid in pids] == [0, 0]


def test_leases_tell_which_sandboxes_were_swept(leases: Path, sleeper: Any) -> None:
    started = lease.start_time(sleeper.pid)
    lease.publish(leases, claim(owner_start=1, pid=sleeper.pid, pid_start=started))
    (line,) = lease.sweep(leases)
    assert line.startswith("0/0/0 of run r: 1 processes ended")


def test_one_that_cannot_be_removed_does_not_keep_the_rest(
    leases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    lease.publish(leases, claim(owner_start=1, kind="docker"))
    lease.publish(leases, claim(owner_start=1))
    assert len(lease.sweep(leases)) == 1
    assert len(list(leases.glob("*.json"))) == 1


def test_half_a_lease_of_one_who_was_killed_goes_once_it_is_old(leases: Path) -> None:
    leases.mkdir()
    for name in ("old", "young"):
        (leases / f"{name}.tmp").touch()
    os.utime(leases / "old.tmp", (1, 1))
    assert lease.sweep(leases) == []
    assert [path.name for path in leases.iterdir()] == ["young.tmp"]


def test_a_lost_sandbox_leaves_no_process_after_close(image: Path, box: Any) -> None:
    async def body(sandbox: Any) -> None:
        await sandbox.exec(f"setsid sleep {SECONDS} & setsid sleep {SECONDS} &", timeout_s=30)
        await box.lose(sandbox)
        await sandbox.close()
        # a pid namespace is torn down by the kernel, in its own time
        await until(lambda: not sleepers(SECONDS), in_thread=True)

    box.run(body)


def test_a_lease_names_run_owner_and_processes(box: Any) -> None:
    async def body(provider: SandboxProvider) -> dict[str, Any]:
        sandbox: Any = await provider.start(box.image, owner="3/1/0")
        (path,) = box.leases.glob("*.json")
        return {**json.loads(path.read_text()), "found": sandbox.pid}

    told = box.provider(body)
    assert (told["run"], told["owner"], told["owner_pid"]) == ("test", "3/1/0", os.getpid())
    assert told["kind"] or told["pid"] == told["found"]
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
    assert sleeper.wait(30) == -signal.SIGKILL


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


def abandoned(parent: Path, **changes: Any) -> Path:
    one = claim(owner_start=1, **changes)
    one = replace(one, scratch=str(parent / f"{lease.SCRATCH}{one.id}"))
    lease.make_scratch(one)
    return Path(one.scratch)


def test_a_scratch_of_a_dead_owner_is_removed_though_its_run_is_gone(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    kept = abandoned(tmp_path, host="elsewhere/boot")
    assert left.stat().st_mode & 0o077 == 0  # commands may have left setuid programs there
    assert "run r" in lease.sweep_scratch(tmp_path)[0]
    assert (left.exists(), kept.exists()) == (False, True)


def test_a_scratch_without_a_claim_is_removed_once_it_is_old(tmp_path: Path) -> None:
    for name in ("old", "young"):
        (tmp_path / f"{lease.SCRATCH}{name}").mkdir()
    os.utime(tmp_path / f"{lease.SCRATCH}old", (1, 1))
    assert len(lease.sweep_scratch(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{lease.SCRATCH}young"]


def test_opening_a_provider_removes_what_dead_owners_left(image: Path, tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    config = SandboxConfig(kind="process", scratch=str(tmp_path))
    open_provider(config, run="r", leases=tmp_path / "leases", concurrency=1)
    assert not left.exists()


def test_the_process_kind_keeps_what_is_put_in_tmp_to_itself(box: Any) -> None:
    async def body(sandbox: Any) -> str:
        await sandbox.put("/tmp/agentrl-test/one", b"1")
        done = await sandbox.exec("cat ${TMPDIR:-/tmp}/agentrl-test/one", timeout_s=30)
        return str(done.output)

    assert box.run(body) == "1"
    assert not Path("/tmp/agentrl-test").exists()


def test_control_groups_of_dead_processes_are_removed(tmp_path: Path) -> None:
    for name in ("memory/apptainer/999999999", f"memory/apptainer/{os.getpid()}", "pids/other/1"):
        (tmp_path / name).mkdir(parents=True)
    assert cgroups.remove_dead(tmp_path) == 1
    assert [path.name for path in tmp_path.glob("*/apptainer/*")] == [str(os.getpid())]
