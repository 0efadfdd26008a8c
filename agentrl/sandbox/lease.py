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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox import cgroups

log = logging.getLogger(__name__)
MARK = "AGENTRL_LEASE"
"""Environment variable of a sandbox's host processes: finds those that left their parent."""
SCRATCH = "agentrl_lease-"
"""First part of the name of every scratch folder; the rest is the lease's id."""
CLAIM = "lease.json"
"""Copy of the lease in the scratch itself, for when the folder of leases is gone."""
LABEL = "agentrl_lease"
"""By which a service knows a sandbox's lease."""
UNCLAIMED_S = 3600.0
"""A scratch without a claim is removed once it is as old as this."""
LIFETIME_S = 86_400.0
END_TIMEOUT_S = 5.0
MONITOR_TIMEOUT_S = 3.0
PARENT, SESSION = 1, 3
"""Fields of /proc/PID/stat."""


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
    kind: str = ""
    """Of a sandbox that a service holds: `docker` or `e2b`."""


def new(*, run: str, owner: str, kind: str = "") -> Lease:
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
        kind=kind,
    )


def publish(leases: Path, lease: Lease) -> None:
    """Write a lease whole, without fsync: it has to outlive its owner, not the machine."""
    path = path_of(leases, lease)
    leases.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(lease)))
    unfinished.replace(path)


def make_scratch(lease: Lease) -> None:
    """Make the lease's folder, with its claim in it."""
    folder = Path(lease.scratch)
    folder.mkdir(mode=0o700)
    (folder / CLAIM).write_text(json.dumps(asdict(lease)))


def read(path: Path) -> Lease | None:
    """Return the lease in a file; None when it holds none."""
    try:
        return Lease(**json.loads(path.read_text()))
    except (ValueError, TypeError, FileNotFoundError):
        return None


def remove(leases: Path, lease: Lease) -> None:
    path_of(leases, lease).unlink(missing_ok=True)


def path_of(leases: Path, lease: Lease) -> Path:
    return leases / f"{lease.id}.json"


def sweep(leases: Path) -> list[str]:
    """End and remove what no living owner claims; return a line for each lease removed."""
    for path in leases.glob("*.tmp"):  # of one who was killed while it wrote
        if _is_old(path):
            path.unlink(missing_ok=True)
    removed, unclaimed = [], _unclaimed(leases)
    found = marks() if unclaimed else set()
    for path, lease in unclaimed:
        what = f"sandboxes of {lease.kind}" if lease.kind else "processes"
        try:
            ended = 0 if _is_over(lease, found) else end_here(lease)
            remove(leases, lease)
        except (SandboxUnavailable, OSError) as error:  # one that cannot be must not keep the rest
            log.warning("%s of run %s is left as it is: %s", lease.owner, lease.run, error)
            continue
        removed.append(f"{lease.owner} of run {lease.run}: {ended} {what} ended ({path.name})")
    return removed


def _unclaimed(leases: Path) -> list[tuple[Path, Lease]]:
    found = []
    for path in sorted(leases.glob("*.json")):
        lease = read(path)
        if lease is None:
            log.warning("%s is not a lease; left as it is", path)
        elif not _is_claimed(lease):
            found.append((path, lease))
    return found


def _is_over(lease: Lease, found: set[str]) -> bool:
    """Whether nothing is left to end. found: the marks seen since its owner died.

    After a crash there may be hundreds of leases, and the whole of /proc is long to read for each.
    """
    is_here = lease.host == host_id() and not lease.kind and not lease.scratch
    return is_here and lease.id not in found and not _first(lease)


def sweep_scratch(parent: Path) -> list[str]:
    """End what the scratch folders below `parent` belonged to, where no living owner claims it.

    For owners whose run, and so their leases, are gone too. Folders of other users are left.
    """
    removed = []
    for folder in sorted(parent.glob(f"{SCRATCH}*")):
        try:
            removed += _sweep_folder(folder)
        except OSError as error:
            log.warning("%s is left as it is: %s", folder, error)
    cgroups.remove_dead()
    return removed


def _sweep_folder(folder: Path) -> list[str]:
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.geteuid():
        return []
    lease = read(folder / CLAIM)
    if lease is None:
        if not _is_old(folder) or marked(folder.name.removeprefix(SCRATCH)):
            return []
        _remove_tree(folder)
        return [f"{folder}: nobody's"]
    if _is_claimed(lease):
        return []
    ended = end_here(replace(lease, scratch=str(folder)))
    return [f"{lease.owner} of run {lease.run}: {ended} processes ended ({folder})"]


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > UNCLAIMED_S
    except FileNotFoundError:
        return False


def end(leases: Path, lease: Lease) -> int:
    """Kill a sandbox's processes, remove its scratch and its lease; return how many were killed."""
    ended = end_here(lease)
    remove(leases, lease)
    return ended


def end_here(lease: Lease) -> int:
    """Kill a sandbox's processes, remove its scratch; return how many were killed.

    Of one that a service holds: have the service end it; return how many there were.
    """
    if lease.kind:
        return _end_remote(lease)
    ended: set[int] = set()
    if lease.host == host_id():
        _end_first_inside(lease)
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and (left := _processes(lease)):
            ended |= set(left)
            kill(left)
        _remove_scratch(lease)
    return len(ended)


def discard(leases: Path, lease: Lease) -> None:
    """Remove the scratch and the lease of a sandbox whose processes have ended."""
    _remove_scratch(lease)
    remove(leases, lease)


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


def marks() -> set[str]:
    """Return the ids of the leases whose marks processes of this host carry."""
    sign = f"{MARK}=".encode()
    words = (word for pid in _pids() for word in _environment(pid))
    own = (word.removeprefix(sign) for word in words if word.startswith(sign))
    return {word.decode(errors="replace") for word in own}  # what a command sets may be anything


def descendants(*pids: int) -> set[int]:
    """Return `pids` and all processes below them."""
    parents = {one: _stat(one, PARENT) for one in _pids()}
    found, grew = set(pids), True
    while grew:
        new = {one for one, parent in parents.items() if parent in found and one not in found}
        found |= new
        grew = bool(new)
    return found


def first_inside(pid: int) -> list[int]:
    """Return the first process of each pid namespace that was made below `pid`."""
    return [one for one in descendants(pid) if _is_first_inside(one)]


def _is_claimed(lease: Lease) -> bool:
    name = lease.host.partition("/")[0]
    if name != socket.gethostname():
        return time.time() < lease.expires
    if lease.host != host_id():
        return False
    return lease.owner_start == start_time(lease.owner_pid) and lease.owner_start != 0


def _processes(lease: Lease) -> list[int]:
    """Return what still runs of a sandbox; its first pid only if that is the same process still.

    The mark finds who left the first process, and that itself where its owner died before it wrote
    its pid down. A bwrap that is killed as it starts leaves its child: that waits for a word of it
    for ever, and has not asked yet to die with it. The first process led a session, and FUSE's,
    whose environment is empty, are in it still.
    """
    own = [*_first(lease), *marked(lease.id)]
    if lease.scratch:
        sessions = {lease.pid, *(_stat(pid, SESSION) for pid in own)} - {0, -1}
        own += [pid for pid in _pids() if _is_fuse(pid) and _stat(pid, SESSION) in sessions]
    return [pid for pid in own if start_time(pid)]


def _first(lease: Lease) -> list[int]:
    return [lease.pid] if lease.pid and start_time(lease.pid) == lease.pid_start else []


def _is_fuse(pid: int) -> bool:
    try:
        return "fuse" in Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _end_remote(lease: Lease) -> int:
    if lease.kind == "docker":
        from agentrl.sandbox import docker

        return docker.end_by_lease(lease.id, is_owner_dead=lease.owner_pid != os.getpid())
    from agentrl.sandbox import e2b

    return e2b.end_by_lease(lease.id)


def _end_first_inside(lease: Lease) -> None:
    """End the sandbox from within, and give what holds its mounts a while to undo them."""
    left = set(_processes(lease))
    kill(inner := [one for one in descendants(*left) if _is_first_inside(one)])
    deadline = time.monotonic() + MONITOR_TIMEOUT_S
    while inner and time.monotonic() < deadline and _processes(lease):
        time.sleep(0.01)


def _is_first_inside(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    ids = next((line.split()[1:] for line in status.splitlines() if line[:5] == "NSpid"), [])
    return len(ids) > 1 and ids[-1] == "1"


def _stat(pid: int, field: int) -> int:
    """Return a number of /proc/PID/stat, counted from the state on; -1 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[field])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def kill(pids: Iterable[int]) -> None:
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


def _remove_scratch(lease: Lease) -> None:
    if Path(lease.scratch).name.startswith(SCRATCH):
        _remove_tree(Path(lease.scratch))


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
