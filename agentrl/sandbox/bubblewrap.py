"""Namespaces by bubblewrap 0.8 or newer: no network, read-only system, an overlay at the testbed.

Not a boundary against kernel exploits. Bounded: each process's memory, CPU time and file size, the
number of processes, all bytes written; memory summed over processes is looked at every 0.1 s. Not
bounded: the share of the CPUs. Where concurrency × (total_memory_mb + 2 × disk_mb) is more than the
host has, a policy may bring the host's out-of-memory killer on its own sandbox, which then counts
as lost (reward None) and not as failed. Commands cannot end, trace, limit or slow the sandbox's
first process on x86-64 and ARM64; elsewhere `prlimit --pid 1` remains to them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.base import TESTBED
from agentrl.sandbox.child import Child, Spawn, compile_executor
from agentrl.sandbox.confine import kernel
from agentrl.sandbox.limits import bounds
from agentrl.sandbox.resident import LOADER, ResidentSandbox

ENVIRONMENT = {
    "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/home/agent",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "user.name",
    "GIT_CONFIG_VALUE_1": "agent",
    "GIT_CONFIG_KEY_2": "user.email",
    "GIT_CONFIG_VALUE_2": "agent@localhost",
}
UNTIL_RLIMITS_PER_NAMESPACE = (5, 14)
"""Linux before this counts RLIMIT_NPROC over all of a user's sandboxes together."""


class Bubblewrap:
    """Says what to run for one sandbox; made once, after checking that this host can."""

    name = "bubblewrap"
    kind = ""
    is_system_writable = False
    measure = None

    def __init__(self, config: SandboxConfig, *, python: str = "/usr/bin/python3") -> None:
        self.config = config
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxUnavailable(
                "sandbox.kind=bubblewrap: no bwrap on PATH; install the package `bubblewrap` "
                "(Debian, Fedora, Arch), or ask for sandbox.kind=process, which isolates nothing"
            )
        self.bwrap = found
        self.python, self.system = inside_python(python)
        probe(found, tuple(self.system))
        self.code = compile_executor(self.python)

    def scratch(self, claim: lease.Lease) -> str:
        """All that a sandbox writes is in its own tmpfs."""
        del claim
        return ""

    async def create(self, image: Path, claim: lease.Lease) -> ResidentSandbox:
        """Start one; nothing in it is waited for."""
        spawn = self.spawn(image, claim)
        return ResidentSandbox(Child(spawn), code=self.code, places=spawn.places)

    def spawn(self, image: Path, claim: lease.Lease) -> Spawn:
        """Return the command that starts one over `image`, whose `testbed` is the repository."""
        testbed = image / "testbed"
        if not testbed.is_dir():
            raise SandboxStartError(f"image {image} has no folder `testbed`; prepare it first")
        is_root = os.geteuid() == 0
        # an overlay lets only the files' owner write, and the namespace maps one uid only
        is_foreign = testbed.stat().st_uid != os.geteuid()
        numbers = (
            int(not is_root and kernel() >= UNTIL_RLIMITS_PER_NAMESPACE),
            int(is_foreign),
            *bounds(self.config),
        )
        return Spawn(
            argv=[
                *(self.bwrap, *self.system, *self._writable(testbed.resolve())),
                *("--", self.python, "-I", "-S", "-c", LOADER),
                *("init", self.config.shell, *map(str, numbers)),
            ],
            env={"PATH": "/usr/bin:/bin", lease.MARK: claim.id},
        )

    def _writable(self, testbed: Path) -> list[str]:
        scratch = [f"/.scratch/{name}" for name in ("upper", "work", "tmp", "home", "shm")]
        folders = ["/tmp", "/etc", "/home/agent", TESTBED, "/dev/shm"]
        return [
            *("--ro-bind", str(testbed), "/.image"),
            *("--size", str(self.config.disk_mb << 20), "--tmpfs", "/.scratch"),
            *(word for folder in (*folders, *scratch) for word in ("--dir", folder)),
        ]


@functools.cache
def probe(bwrap: str, system: tuple[str, ...]) -> None:
    """Raise SandboxUnavailable unless bwrap can make the namespaces here; asked once a process."""
    argv = [bwrap, *system, "--", "/usr/bin/env", "true"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise SandboxUnavailable(
            f"sandbox.kind=bubblewrap: {done.stderr.strip() or done.returncode}; {_advice()}, "
            "or ask for sandbox.kind=process, which isolates nothing"
        )


def inside_python(python: str) -> tuple[str, list[str]]:
    """Return the path of the Python that commands get, and bwrap's flags for the system.

    It is `python` of the host's system, else the Python that runs this, lent read-only.
    """
    flags = [
        *("--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--uid", "0", "--gid", "0", "--hostname", "sandbox", "--cap-add", "ALL", "--clearenv"),
        *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair)),
        *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
    ]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/", name)
        if host.is_symlink():
            flags += ["--symlink", os.readlink(host), str(host)]
        elif host.is_dir():
            flags += ["--ro-bind", str(host), str(host)]
    for bit in ("/etc/ld.so.cache", "/etc/alternatives"):
        flags += ["--ro-bind-try", bit, bit]
    if not os.access(python, os.X_OK):
        python = str(Path(sys.base_prefix, "bin", "python3"))
        # at its own path: that is where it looks for its library
        flags += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        flags += ["--symlink", python, "/opt/bin/python3"]
    return python, [*flags, "--symlink", python, "/opt/bin/python"]


def _advice() -> str:
    """Say which setting of this host forbids user namespaces, as far as can be seen."""
    settings = {
        "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
        "kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for name, (bad, command) in settings.items():
        path = Path("/proc/sys", name)
        if path.exists() and path.read_text().strip() == bad:
            return f"user namespaces are switched off: `{command}` as root"
    return "user namespaces are refused here (a container's seccomp profile, perhaps): allow them"
