"""What a number of sandboxes at once needs of this host, checked before the first starts."""

from __future__ import annotations

import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxUnavailable

FILES_PER_SANDBOX = 2
"""A socket and a pidfd; what is open for a moment at a start or an end is in the reserve."""
RESERVED_FILES = 256
"""For the process that owns them: engine connections, event files, libraries."""
PROCESSES_PER_SANDBOX = 2
"""bwrap's monitor and the executor; commands come on top."""
PROCESSES_BY_KIND = {"apptainer": 13, "docker": 0, "e2b": 0}
"""Where it is another number; threads count as the kernel counts them: Apptainer's monitor has
about ten, and FUSE is two more."""


def processes_of(kind: str) -> int:
    """Return the processes and threads of one sandbox on this host while a command runs."""
    return PROCESSES_BY_KIND.get(kind, PROCESSES_PER_SANDBOX) + 1


SPARE_MB = 256
"""Between what a sandbox's commands may take together, which is watched, and a cgroup's bound."""
SHARED_MB = 64
"""/dev/shm of a container, in memory beside what its processes take."""


def memory_mb_of(config: SandboxConfig, *, is_scratch_in_memory: bool = False) -> int:
    """Return the most memory of this host that one sandbox can take, MiB; 0 for a service's.

    is_scratch_in_memory: the scratch folder is on a tmpfs, so what is written there takes memory.
    """
    commands = config.total_memory_mb or config.memory_mb * config.processes
    if config.kind == "e2b":
        return 0
    if config.kind == "bubblewrap":  # its tmpfs, whose inodes take as much again
        return commands + 2 * config.disk_mb
    if config.kind == "docker":
        return commands + SPARE_MB
    shared = SHARED_MB if config.kind == "apptainer" else 0
    return commands + shared + (config.disk_mb if is_scratch_in_memory else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Needs of `concurrency` sandboxes; made by `derive`, so all pools agree."""

    concurrency: int
    open_files: int
    processes: int
    namespaces: int
    """User namespaces."""
    connections: int
    """Requests to a sandbox service at once: a command and a heartbeat of each."""

    @classmethod
    def derive(cls, concurrency: int, kind: str = "bubblewrap") -> Limits:
        return cls(
            concurrency=concurrency,
            open_files=RESERVED_FILES + FILES_PER_SANDBOX * concurrency,
            processes=processes_of(kind) * concurrency,
            namespaces=concurrency,
            connections=2 * concurrency,
        )


def caps(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return each cap of this host: name → (needed, allowed)."""
    return {
        "open files (ulimit -Hn)": (limits.open_files, _hard(resource.RLIMIT_NOFILE)),
        "processes (ulimit -u)": (limits.processes, _soft(resource.RLIMIT_NPROC)),
        "process ids (kernel.pid_max)": (limits.processes, _sysctl("kernel/pid_max")),
        "user namespaces (user.max_user_namespaces)": (
            limits.namespaces,
            _sysctl("user/max_user_namespaces"),
        ),
    }


def secure(limits: Limits) -> None:
    """Raise this process's soft limit on open files as needed.

    Raises SandboxUnavailable when a cap is too small, naming the smallest for its need.
    """
    short = {name: pair for name, pair in caps(limits).items() if pair[1] < pair[0]}
    if short:
        name, (needed, allowed) = min(short.items(), key=lambda item: item[1][1] / item[1][0])
        raise SandboxUnavailable(
            f"{limits.concurrency} sandboxes at once need {needed} {name}; this host allows "
            f"{allowed}: raise it, or lower rollout.concurrency"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < limits.open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, hard))


def _hard(which: int) -> int:
    return _bound(resource.getrlimit(which)[1])


def _soft(which: int) -> int:
    return _bound(resource.getrlimit(which)[0])


def _bound(value: int) -> int:
    return 1 << 62 if value == resource.RLIM_INFINITY else value


def _sysctl(name: str) -> int:
    path = Path("/proc/sys") / name
    return int(path.read_text()) if path.exists() else 1 << 62


def scratch_folder(config: SandboxConfig) -> Path:
    """Return the folder on this node below which sandboxes keep what is written in them."""
    return Path(config.scratch or tempfile.gettempdir())


def bounds(config: SandboxConfig) -> tuple[int, int, int, int, int]:
    """Return what the executor bounds inside, in the order of its arguments."""
    c = config
    return (c.memory_mb, c.cpu_s, c.processes, c.file_mb, c.total_memory_mb)
