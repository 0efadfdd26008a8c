"""What a sandbox's first process does to itself before any command runs.

In this order: it finishes the tree that bwrap began, closes it to writing, gives up every privilege
and bounds its resources. Anything that fails ends the start.

Part of the program that runs inside with `-I -S`: it imports as little as it can.
"""

from __future__ import annotations

import os
import resource
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_FROM_STATVFS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags that a remount must repeat: nosuid, nodev, noexec, noatime, nodiratime, relatime."""


GUARDED = {
    "x86_64": (0xC000003E, (302, 142, 144, 203, 314)),
    "aarch64": (0xC00000B7, (261, 118, 119, 122, 274)),
}
"""By machine: its name to seccomp, and the numbers of prlimit64, sched_setparam, _setscheduler,
_setaffinity and _setattr: calls that take a pid first and ask for no more than the same uid."""


def libc(name: str, *args: int | bytes | None) -> None:
    """Call a function of libc that answers 0 or sets errno. Raises OSError.

    `_ctypes` alone costs a fifth of `ctypes`; where its shape has changed, `ctypes` does the same.
    """
    try:
        import _ctypes

        itself = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # typeshed wants a path
        address = _ctypes.dlsym(itself, name)
        result = _ctypes.call_function(address, args)
    except (ImportError, AttributeError):
        import ctypes

        result = ctypes.CDLL(None)[name](*args)
    if result != 0:
        raise OSError(0, f"{name}{args} was refused by the kernel")


def mount(source: bytes | None, target: str, kind: bytes | None, flags: int, data: bytes) -> None:
    libc("mount", source, target.encode(), kind, flags, data or None)


def make_read_only(path: str) -> None:
    """Remount the mount at `path` read-only, with the flags it has: some of them are locked."""
    found = os.statvfs(path).f_flag
    flags = sum(ms for st, ms in MS_FROM_STATVFS.items() if found & st)
    mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, b"")


def bind(source: str, target: str) -> None:
    mount(source.encode(), target, None, MS_BIND, b"")


def lay_testbed(copy: bool) -> bytes:
    """Put a writable view of /.image at /testbed; return how: `overlay` or `copy`."""
    if not copy:
        options = b"lowerdir=/.image,upperdir=/.scratch/upper,workdir=/.scratch/work,userxattr"
        try:
            # a tmpfs without user xattrs (Linux < 6.6) cannot mark a replaced folder opaque
            os.setxattr("/.scratch/upper", "user.probe", b"1")
            os.removexattr("/.scratch/upper", "user.probe")
            mount(b"overlay", "/testbed", b"overlay", MS_NOSUID | MS_NODEV, options)
            return b"overlay"
        except OSError:
            pass
    import shutil

    shutil.copytree("/.image", "/.scratch/upper", symlinks=True, dirs_exist_ok=True)
    bind("/.scratch/upper", "/testbed")
    return b"copy"


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(copy: bool, processes: int) -> bytes:
    """Finish the tree that bwrap began, and close it: only the scratch stays writable."""
    if os.getpid() != 1 or not os.path.isdir("/.scratch/upper"):
        raise PermissionError("not in a sandbox that bwrap began: refusing to touch any mount")
    os.umask(0o022)
    write("/etc/passwd", "root:x:0:0:root:/home/agent:/bin/bash\n")
    write("/etc/group", "root:x:0:\n")
    write("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
    write("/etc/hosts", "127.0.0.1 localhost\n")
    # without a bound on files a tmpfs takes half of the host's memory for them, empty as they are
    options = b"nr_inodes=%d" % bounded_inodes("/.scratch")
    mount(None, "/.scratch", None, MS_REMOUNT | MS_NOSUID | MS_NODEV, options)
    how = lay_testbed(copy)
    for name, target in (("tmp", "/tmp"), ("home", "/home/agent"), ("shm", "/dev/shm")):
        bind(f"/.scratch/{name}", target)
    os.chmod("/tmp", 0o1777)
    os.chmod("/dev/shm", 0o1777)
    # hide the overlay's layers: a writer to them would corrupt the view
    mount(b"none", "/.scratch", b"tmpfs", MS_RDONLY, b"size=4k,mode=0")
    mount(b"none", "/.image", b"tmpfs", MS_RDONLY, b"size=4k,mode=0")
    write("/proc/sys/user/max_user_namespaces", "0")
    if kernel() >= (6, 14):  # before, this was the whole host's; ids below 300 are given once only
        write("/proc/sys/kernel/pid_max", str(max(301 + processes, 400)))
    shield_host()
    make_read_only("/")
    return how


def bounded_inodes(folder: str) -> int:
    """Return how many files a tmpfs may hold: one a KiB of its size, about what each takes."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize // 1024


def shield_host() -> None:
    """Make read-only what the host's own root may change by ownership, without any capability."""
    for name in ("1", "sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"):
        if os.path.exists(path := f"/proc/{name}"):
            bind(path, path)
            make_read_only(path)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        if os.path.exists(path := f"/dev/{name}"):
            make_read_only(path)
    make_read_only("/dev")


def kernel() -> tuple[int, int]:
    """Return this kernel's version, major and minor."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def drop_privileges() -> None:
    """Give up all capabilities for good, and become unreadable to processes of the same uid."""
    pr_set_dumpable, pr_capbset_drop, pr_no_new_privs, pr_ambient, clear_all = 4, 24, 38, 47, 4
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    libc("prctl", pr_ambient, clear_all, 0, 0, 0)
    for capability in range(last + 1):
        libc("prctl", pr_capbset_drop, capability, 0, 0, 0)
    version_3 = 0x20080522
    header = version_3.to_bytes(4, sys.byteorder) + bytes(4)
    libc("capset", header, bytes(24))
    libc("prctl", pr_no_new_privs, 1, 0, 0, 0)
    libc("prctl", pr_set_dumpable, 0, 0, 0, 0)
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    held = [
        name for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb") if int(status[name], 16)
    ]
    if held or status["NoNewPrivs"].strip() != "1":
        raise PermissionError(f"privileges are still held after dropping them: {held}")


def guard_first_process() -> None:
    """Refuse calls with which commands could starve this process: a policy would end its sandbox.

    They share its uid, so prlimit(1, …) would be theirs to call. Elsewhere than on the machines of
    GUARDED it stays possible. Calls of another word size are refused altogether.
    """
    if os.uname().machine not in GUARDED:
        return
    arch, numbers = GUARDED[os.uname().machine]
    load, mask, equal, answer, x32 = 0x20, 0x54, 0x15, 0x06, 0x40000000
    allow, refuse = 0x7FFF0000, 0x00050000 | 1  # EPERM
    program = [
        (load, 0, 0, 4),  # the machine
        (equal, 0, len(numbers) + 6, arch),
        (load, 0, 0, 0),  # the call
        (mask, 0, 0, 0xFFFFFFFF ^ x32),
        *((equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (answer, 0, 0, allow),
        (load, 0, 0, 16),  # its pid
        (equal, 1, 0, 1),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    code = b"".join(
        op.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for op, yes, no, value in program
    )
    place = id(code) + bytes.__basicsize__ - 1  # CPython's; `array` would import collections, 3 ms
    header = len(program).to_bytes(8, "little") + place.to_bytes(8, "little")
    pr_set_seccomp, mode_filter = 22, 2
    libc("prctl", pr_set_seccomp, mode_filter, header, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, as pid 1 is."""
    pr_set_child_subreaper = 36
    libc("prctl", pr_set_child_subreaper, 1, 0, 0, 0)


def set_limits(memory_mb: int, file_mb: int, nproc: int) -> None:
    """Bound this process and all that it starts. nproc 0 leaves that limit alone."""
    wanted = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_CORE: 0,
    }
    if nproc:
        wanted[resource.RLIMIT_NPROC] = nproc
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))
