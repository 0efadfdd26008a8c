"""What is Apptainer's own: its flags, its FUSE processes, its scratch on the node's disk."""

from __future__ import annotations

import asyncio
import csv
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from boxes import NO_APPTAINER, Box, needs_apptainer
from users import NOBODY, as_nobody, needs_root

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.apptainer import Apptainer, mount
from agentrl.sandbox.layers import save
from agentrl.sandbox.watch import used_mb, watch, written_mb


def fake(folder: Path, says: str) -> None:
    program = folder / "apptainer"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)


def test_a_missing_apptainer_says_where_to_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"no apptainer on PATH.*EPEL"):
        Apptainer(SandboxConfig())


@pytest.mark.parametrize("says", ["apptainer version 1.0.3", "singularity-ce version 4.1.0", ""])
def test_what_is_no_apptainer_of_today_is_refused_in_its_own_words(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, f"echo '{says}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=f"says '{says}'; Apptainer 1.1 or newer"):
        Apptainer(SandboxConfig())


def test_a_site_that_refuses_containers_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path, "[ $1 = exec ] && echo 'FATAL: no namespaces' >&2 && exit 255; echo apptainer 1.4"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match="FATAL: no namespaces"):
        Apptainer(SandboxConfig(environment="/any.sif"))


def test_a_mount_may_have_any_name() -> None:
    (fields,) = csv.reader(mount(Path('/a, "b": c'), "/x", is_read_only=True)[1:])
    assert fields == ["type=bind", 'source=/a, "b": c', "destination=/x", "ro"]


@pytest.fixture
def apptainer(image: Path, leases: Path, request: pytest.FixtureRequest) -> Box:
    if shutil.which("apptainer") is None:
        pytest.skip(NO_APPTAINER)
    return Box("apptainer", image, leases, str(request.getfixturevalue("apptainer_root")))


def test_an_environment_that_is_not_on_this_node_is_a_start_error(apptainer: Any) -> None:
    (apptainer.image / "environment").write_text("/none.sif\n")
    with pytest.raises(SandboxStartError, match=r"/none\.sif.*no such SIF"):
        apptainer.sh("true")


def test_an_environment_without_a_python_says_so(apptainer: Any, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(apptainer.config.environment, bare, symlinks=True)
    for name in ("python", "python3"):
        (bare / "usr/bin" / name).unlink()
    (apptainer.image / "environment").write_text(str(bare))
    with pytest.raises(SandboxStartError, match=r"no Python 3\.9"):
        apptainer.sh("true")


def test_an_environment_may_have_the_repository_itself(apptainer: Any, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(apptainer.config.environment, own, symlinks=True)
    (own / "testbed").mkdir()
    (own / "testbed/b.txt").write_text("inside\n")
    apptainer.image = tmp_path / "image"
    apptainer.image.mkdir()
    (apptainer.image / "environment").write_text(str(own))
    assert apptainer.sh("cat b.txt; echo new > b.txt").output == "inside\n"
    assert (own / "testbed/b.txt").read_text() == "inside\n"


def test_the_whole_tree_is_writable_and_nothing_of_it_stays(apptainer: Any) -> None:
    done = apptainer.sh("echo x > /usr/bin/new && echo y > /etc/new && cat /usr/bin/new /etc/new")
    assert done.output == "x\ny\n"
    assert not (Path(apptainer.config.environment) / "usr/bin/new").exists()


def test_names_of_the_hosts_folders_are_absent(apptainer: Any) -> None:
    done = apptainer.sh("env; ls /sys /root; cat /proc/mounts | grep -c home")
    assert "APPTAINER" not in done.output
    assert str(apptainer.config.environment) not in done.output
    assert done.output.endswith("0\n")


def test_bytes_over_the_limit_end_what_runs_and_are_said(apptainer: Any) -> None:
    async def body(sandbox: Any) -> Any:
        (claim,) = claims_of(apptainer)
        watching = asyncio.create_task(
            watch({sandbox: claim}, written_mb, limit_mb=5, interval_s=0.1)
        )
        done = await sandbox.exec("head -c 9000000 /dev/zero > /root/big; sleep 60", timeout_s=60)
        watching.cancel()
        return done, await sandbox.exec("true", timeout_s=30)

    done, after = apptainer.run(body)
    assert "over the limit of 5 MiB" in done.output
    assert (done.timed_out, done.oom, after.exit_code) == (False, False, 126)


def claims_of(box: Box) -> list[lease.Lease]:
    return [claim for path in box.leases.glob("*.json") if (claim := lease.read(path))]


def test_what_files_take_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"x" * (2 << 20))
    assert 1.9 < used_mb(str(tmp_path)) < 2.5
    for number in range(1024):
        (tmp_path / f"empty{number}").touch()
    assert 2.9 < used_mb(str(tmp_path)) < 3.5


ORDINARY = """
import asyncio, os, signal, sys
from pathlib import Path
import psutil
from agentrl.config import SandboxConfig
from agentrl.errors import SandboxLost
from agentrl.sandbox import lease
from agentrl.sandbox.provider import open_provider

def fuse():
    found = [p.info for p in psutil.process_iter(["name", "uids", "status"])]
    mine = [i for i in found if i["uids"].real == os.getuid() and i["status"] != "zombie"]
    return sum("fuse" in info["name"] for info in mine)

async def main(environment, image, scratch):
    config = SandboxConfig(
        kind="apptainer", environment=environment, scratch=scratch, start_timeout_s=120.0
    )
    leases = Path(scratch, "leases")
    provider = open_provider(config, run="r", leases=leases, concurrency=2)
    sandbox = await provider.start(Path(image), owner="0/0/0")
    done = await sandbox.exec(
        "cat a.txt; rm -r pkg; echo x > /usr/bin/new && id -u; grep CapEff /proc/self/status",
        timeout_s=60,
    )
    print(sandbox.how, done.output.split(), "fuse" if fuse() else "no fuse")
    await sandbox.close()
    print("closed", fuse(), list(leases.iterdir()))
    sandbox = await provider.start(Path(image), owner="0/0/1")
    await sandbox.exec("sleep 1000 &", timeout_s=30)
    os.kill(sandbox.pid, signal.SIGKILL)
    try:
        await sandbox.exec("sleep 1000", timeout_s=600)
    except SandboxLost:
        print("lost")
    await sandbox.close()
    print("killed", fuse(), list(leases.iterdir()), os.listdir(scratch))
    await provider.close()

asyncio.run(main(*sys.argv[1:]))
"""


@needs_apptainer
@needs_root
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="`apt-get install squashfs-tools`")
@pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or os.stat("/dev/fuse").st_mode & 0o666 != 0o666,
    reason="/dev/fuse is not open to ordinary users: `chmod 666 /dev/fuse`",
)
def test_an_ordinary_user_has_a_sif_and_leaves_no_fuse_process(
    image: Path, apptainer_root: Path, open_folder: Path
) -> None:
    sif = open_folder / "environment.sqfs"
    fast = ["-quiet", "-no-progress", "-noI", "-noD", "-noF", "-noX"]
    command = ["mksquashfs", str(apptainer_root), str(sif), "-all-root", *fast]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copytree(image, open_folder / "image", symlinks=True)
    (open_folder / "scratch").mkdir()
    os.chown(open_folder / "scratch", NOBODY, NOBODY)
    words = [str(open_folder / name) for name in ("environment.sqfs", "image", "scratch")]
    before = set(psutil.Process().children())  # of other tests, as a small cluster's
    done = as_nobody(ORDINARY, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "copy ['one', '0', 'CapEff:', '0000000000000000'] fuse",
        "closed 0 []",
        "lost",
        "killed 0 [] ['leases']",
    ], done.stdout + done.stderr
    assert set(psutil.Process().children()) <= before


def test_a_sandbox_goes_on_from_a_saved_one(apptainer: Any, tmp_path: Path) -> None:
    async def body(provider: Any) -> str:
        first = await provider.start(apptainer.image, owner="0/0/0")
        await first.exec("rm -r pkg; echo kept > b.txt; echo tool > /usr/bin/new", timeout_s=30)
        await first.stop_processes()
        (claim,) = claims_of(apptainer)
        environment = apptainer.config.environment
        saved = tmp_path / "saved"
        save(Path(claim.scratch), apptainer.image, saved, environment=environment, how=first.how)
        await first.close()
        again = await provider.start(saved, owner="0/0/1")
        return str((await again.exec("ls; cat b.txt /usr/bin/new", timeout_s=30)).output)

    assert apptainer.provider(body) == "a.txt\nb.txt\nlink\nkept\ntool\n"
