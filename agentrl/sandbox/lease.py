"""Who owns which sandbox on this host, in files that outlive the owner.

A lease names the owner's process and the sandbox's by pid AND start time, since pids are given
again. `sweep` ends what no living owner claims. Leases of other hosts are left to those hosts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)
MARK = "AGENTRL_LEASE"
"""Environment variable of a sandbox's host processes: finds those that left their parent."""
LIFETIME_S = 86_400.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One sandbox's claim; `pid` 0 until its first process runs."""

    id: str
    run: str
    owner: str
    """The trajectory."""
    host: str
    owner_pid: int
    owner_start: int
    """Start time in clock ticks since boot, from /proc/PID/stat."""
    pid: int
    pid_start: int
    expires: float
    scratch: str
    """Folder on the host that dies with the sandbox; empty when there is none."""


def new(*, run: str, owner: str) -> Lease:
    """Return a lease of this process that is in no file yet."""
    return Lease(
        id=uuid.uuid4().hex,
        run=run,
        owner=owner,
        host=host_id(),
        owner_pid=os.getpid(),
        owner_start=start_time(os.getpid()),
        pid=0,
        pid_start=0,
        expires=time.time() + LIFETIME_S,
        scratch="",
    )


def publish(leases: Path, lease: Lease) -> None:
    """Write a lease whole, without fsync: it has to outlive its owner, not the machine."""
    path = path_of(leases, lease)
    leases.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(lease)))
    unfinished.replace(path)


def remove(leases: Path, lease: Lease) -> None:
    path_of(leases, lease).unlink(missing_ok=True)


def path_of(leases: Path, lease: Lease) -> Path:
    return leases / f"{lease.id}.json"


def sweep(leases: Path) -> list[str]:
    """End and remove what no living owner claims; return a line for each lease removed."""
    removed = []
    for path in sorted(leases.glob("*.json")):
        lease = _read(path)
        if lease is None:
            log.warning("%s is not a lease; left as it is", path)
            continue
        if _is_claimed(lease):
            continue
        ended = end(leases, lease)
        removed.append(f"{lease.owner} of run {lease.run}: {ended} processes ended ({path.name})")
    return removed


def end(leases: Path, lease: Lease) -> int:
    """Kill a sandbox's processes, remove its scratch and its lease; return how many were killed."""
    ended: set[int] = set()
    if lease.host == host_id():
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and (left := _processes(lease)):
            ended |= set(left)
            _kill(left)
        if lease.scratch and MARK.lower() in Path(lease.scratch).name:
            _remove_tree(Path(lease.scratch))
    remove(leases, lease)
    return len(ended)


def host_id() -> str:
    """Return the host's name and boot: after a reboot none of its processes is left."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def start_time(pid: int) -> int:
    """Return when a process started, clock ticks since boot; 0 when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    rest = stat.rpartition(b")")[2].split()
    return 0 if rest[0] in (b"Z", b"X") else int(rest[19])


def marked(lease_id: str) -> list[int]:
    """Return the pids whose environment carries the lease's mark."""
    mark = f"{MARK}={lease_id}".encode()
    return [pid for pid in _pids() if mark in _environment(pid)]


def _read(path: Path) -> Lease | None:
    try:
        return Lease(**json.loads(path.read_text()))
    except (ValueError, TypeError, FileNotFoundError):
        return None


def _is_claimed(lease: Lease) -> bool:
    name = lease.host.partition("/")[0]
    if name != socket.gethostname():
        return time.time() < lease.expires
    if lease.host != host_id():
        return False
    return lease.owner_start == start_time(lease.owner_pid) and lease.owner_start != 0


def _processes(lease: Lease) -> list[int]:
    """Return what still runs of a sandbox; its first pid only if that is the same process still.

    With a scratch there is no pid namespace, so the mark finds who left the first process.
    """
    own = [lease.pid] if lease.pid and start_time(lease.pid) == lease.pid_start else []
    return [pid for pid in (*own, *(marked(lease.id) if lease.scratch else ())) if start_time(pid)]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _remove_tree(folder: Path) -> None:
    """Remove a folder in which a command may have taken write permission away."""
    if not folder.is_dir() or folder.is_symlink():
        return
    folder.chmod(0o700)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(path := os.path.join(parent, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)
