"""What slurm.lab needs of this machine: root, Debian's packages, a kernel that gives namespaces."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ClusterError

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
"""program → the Debian package that has it."""
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}
PLUGINS = "slurm-wlm-basic-plugins"
INSTALL = ("apt-get", "install", "-y", "--no-install-recommends")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Not on everybody's PATH, root's by `su` among them."""
LONGEST_DIRECTORY = 70
"""Bytes. A socket's path, here DIR/spool/inf0/inf0_JOB.STEP, has 107: past that, jobs hang."""
TRIAL = """\
set -e
hostname trial
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
ip link add trial0 type bridge
ip link add trial1 type veth peer name trial2
"""
"""What the nodes' scripts do, in namespaces that end with it."""


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def which(program: str) -> Path | None:
    found = shutil.which(program, path=search_path())
    return Path(found) if found else None


def missing_packages(*, accounting: bool) -> list[str]:
    """Return the Debian packages whose programs are not here."""
    programs = PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})
    missing = {package for program, package in programs.items() if which(program) is None}
    if missing & {"slurmctld", "slurmd"}:
        missing.add(PLUGINS)
    return sorted(missing)


def check_packages(*, accounting: bool) -> None:
    """Raise ClusterError with the line that installs what is missing."""
    if missing := missing_packages(accounting=accounting):
        raise ClusterError(
            f"this machine lacks {', '.join(missing)}; on Debian, as root: "
            f"{shlex.join([*INSTALL, *missing])}"
        )


def check_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            f"the cluster's nodes are namespaces, which only root can make; this is uid "
            f"{os.geteuid()}: run it as root"
        )


def check_kernel() -> None:
    """Make a node's namespaces and devices for a moment; raise ClusterError if that is refused."""
    unshare = "unshare --net --uts --mount --ipc --pid --fork --kill-child --mount-proc sh -c"
    env = {**os.environ, "PATH": search_path()}
    command = [*unshare.split(), TRIAL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterError(
            f"this machine refuses the namespaces of a node: {said}. In a container, start that "
            "with --privileged, or use a virtual machine"
        )


def check_directory(directory: Path) -> None:
    """Raise ClusterError where Slurm or MUNGE could not use `directory`, an absolute path."""
    if len(os.fsencode(directory)) > LONGEST_DIRECTORY:
        raise ClusterError(
            f"{directory}: over {LONGEST_DIRECTORY} bytes, too long for the sockets below it; "
            "give a shorter one with --dir"
        )
    if not re.fullmatch(r"[\w./+@-]+", str(directory), re.ASCII):
        raise ClusterError(
            f"{str(directory)!r}: Slurm's configuration cannot name it; give a --dir of letters, "
            "digits and ./+@_- only"
        )
    if directory.is_relative_to("/dev/shm"):
        raise ClusterError(f"{directory}: every node has a /dev/shm of its own; give another --dir")


def mounts_below(directory: Path) -> list[str]:
    """Return the mount points below `directory` that this process sees."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if f"{line.split()[4]}/".startswith(f"{directory}/")]


def install(*, accounting: bool) -> list[str]:
    """Install what is missing with apt-get; return the packages. Raises ClusterError, as it said.

    Where systemd runs, the packages start services of their own, which no cluster here uses.
    """
    missing = missing_packages(accounting=accounting)
    if not missing:
        return []
    check_root()
    if not Path("/etc/debian_version").exists() or which("apt-get") is None:
        raise ClusterError(f"not a Debian: install {', '.join(missing)} by its own means")
    if _apt([*INSTALL, *missing]).returncode:
        _apt(["apt-get", "update"])
        done = _apt([*INSTALL, *missing])
        if done.returncode:
            raise ClusterError(
                f"{shlex.join([*INSTALL, *missing])} exited {done.returncode}: {done.stderr[-800:]}"
            )
    check_packages(accounting=accounting)
    return missing


def _apt(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": search_path(), "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
