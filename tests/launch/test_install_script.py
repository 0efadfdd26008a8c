"""configs/install.sh on machines that lack something, with programs on PATH that say so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("sh", "mktemp", "dirname", "rm", "cat", "printf")


def install(
    bin_folder: Path, python: str, venv: Path, *extras: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "configs" / "install.sh"), python, str(venv), *extras],
        env={"PATH": str(bin_folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def program(bin_folder: Path, name: str, text: str) -> Path:
    path = bin_folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(odd_path: Path) -> Path:
    """A PATH with little on it, of a user who is not root."""
    for name in NEEDED:
        if found := shutil.which(name):
            (odd_path / name).symlink_to(os.path.realpath(found))
    program(odd_path, "id", "echo 1000")
    program(odd_path, "git", "exit 0")
    program(odd_path, "bwrap", "exit 0")
    return odd_path


def test_what_is_missing_is_named_with_the_command_that_installs_it(machine: Path) -> None:
    (machine / "bwrap").unlink()
    program(machine, "python3", "exit 1")
    done = install(machine, "python3", machine / "venv")
    assert done.returncode == 1
    assert "sudo apt-get install bubblewrap python3-venv" in done.stderr


def test_a_python_of_another_version_is_refused(machine: Path) -> None:
    program(machine, "python3", 'case "$2" in *print*) echo 3.10;; esac')
    done = install(machine, "python3", machine / "venv")
    assert done.returncode == 1
    assert "python3 is Python 3.10; needed is 3.11, 3.12 or 3.13" in done.stderr


def test_a_failing_step_shows_what_it_said(machine: Path) -> None:
    program(
        machine,
        "python3",
        'case "$*" in *print*) echo 3.11;; "-m venv"*) echo no space left; exit 1;; esac',
    )
    done = install(machine, "python3", machine / "the venv")
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "failed: python3 -m venv" in done.stderr


def test_an_installed_environment_is_kept_and_used(machine: Path) -> None:
    venv = machine / "the venv" / "bin"
    venv.mkdir(parents=True)
    program(machine, "python3", 'case "$*" in *print*) echo 3.12;; esac')
    program(venv, "python", f'[ "$1" = -c ] || echo "$@" >>"{machine}/said"')
    program(venv, "agentrl", "exit 0")
    for extras in ((), ("dev",)):
        done = install(machine, "python3", venv.parent, *extras)
        assert done.returncode == 0, done.stderr
    said = (machine / "said").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in said] == [str(ROOT), f"{ROOT}[dev]"]


def test_what_only_tests_need_is_named_and_not_demanded(machine: Path) -> None:
    venv = machine / "the venv" / "bin"
    venv.mkdir(parents=True)
    program(machine, "python3", 'case "$*" in *print*) echo 3.12;; esac')
    program(venv, "python", "exit 0")
    program(venv, "agentrl", "exit 0")
    plain, dev = (install(machine, "python3", venv.parent, *extras) for extras in ((), ("dev",)))
    assert (plain.returncode, dev.returncode) == (0, 0)
    assert "some tests will be skipped. They need:" in dev.stdout
    assert " slurm-client" in dev.stdout
    assert "sh configs/install_apptainer.sh" in dev.stdout
    assert "skipped" not in plain.stdout


def test_root_on_debian_installs_what_the_tests_need(machine: Path) -> None:
    if not Path("/etc/debian_version").exists():
        pytest.skip("not on Debian, where alone packages are installed")
    venv = machine / "the venv" / "bin"
    venv.mkdir(parents=True)
    program(machine, "id", "echo 0")
    program(machine, "python3", 'case "$*" in *print*) echo 3.12;; esac')
    program(machine, "apt-get", f'echo "$@" >>"{machine}/asked"')
    program(machine, "dpkg", "echo riscv64")
    program(venv, "python", "exit 0")
    program(venv, "agentrl", "exit 0")
    done = install(machine, "python3", venv.parent, "dev")
    assert done.returncode == 0, done.stderr
    assert "slurm-client" in (machine / "asked").read_text()
    assert (
        "without it: its tests will be skipped. install_apptainer: only for amd64, not riscv64"
        in done.stdout
    )
