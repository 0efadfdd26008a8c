"""What the first process of a container does to itself: `confine`, where a runtime made the tree.

Part of the program that runs inside with `-I -S`: it imports as little as it can.
"""

from __future__ import annotations

import os

from agentrl.sandbox.confine import (
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    drop_privileges,
    guard_first_process,
    lay_testbed,
    mount,
    shield_host,
    write,
)

CAP_SYS_ADMIN = 21
RUNTIME_VARIABLES = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND", "PS1")


def enter(copy: bool) -> bytes:
    """Lay the testbed if one was brought, close the tree, give up privileges.

    Returns how the testbed was laid: `overlay`, `copy`, or `image` where the environment has it.
    """
    if os.getpid() != 1:
        raise PermissionError("not the first process of a container: refusing to touch any mount")
    os.umask(0o022)
    for name in [name for name in os.environ if name.startswith(RUNTIME_VARIABLES)]:
        del os.environ[name]  # paths of the host
    may_mount = has(CAP_SYS_ADMIN)
    how = bring_testbed(copy or not may_mount)
    if may_mount:
        if os.path.isdir("/dev/shm"):  # a runtime's own takes up to half of the host's memory
            options = b"size=64m,nr_inodes=65536,mode=1777"
            mount(b"none", "/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, options)
        if os.access(namespaces := "/proc/sys/user/max_user_namespaces", os.W_OK):
            write(namespaces, "0")
        shield_host()
    drop_privileges()
    guard_first_process()
    return how


def bring_testbed(copy: bool) -> bytes:
    """Put what lies in /.image at /testbed; without it the environment's own must be there."""
    if not os.path.isdir("/.image"):
        if not os.path.isdir("/testbed"):
            raise FileNotFoundError(
                2, "the environment has no folder /testbed and the task's image folder none either"
            )
        return b"image"
    os.makedirs("/testbed", exist_ok=True)
    if os.path.isdir("/.scratch/upper"):
        how = lay_testbed(copy)
        # hide the overlay's layers: a writer to them would corrupt the view
        for hidden in ("/.scratch", "/.image"):
            mount(b"none", hidden, b"tmpfs", MS_RDONLY, b"size=4k,mode=0")
        return how
    import shutil

    shutil.copytree("/.image", "/testbed", symlinks=True, dirs_exist_ok=True)
    return b"copy"


def has(capability: int) -> bool:
    with open("/proc/self/status") as file:
        held = next(line for line in file if line.startswith("CapEff"))
    return bool(int(held.split()[1], 16) >> capability & 1)
