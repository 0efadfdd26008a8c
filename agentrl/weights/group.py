"""The process group that weights go over: the trainer's rank 0, and every engine that takes part.

Joined as SGLang's engines join theirs (init_custom_process_group), so that a trainer of ours meets
them: one store, the group's name as prefix, no default group. Both ends must set NCCL_CUMEM_ENABLE
alike; SGLang sets 0, and so do our roles.

Waits over NCCL block and raise: by torch's default an engine that dies in the middle of a broadcast
would take the trainer with it, for its watchdog thread ends the whole process.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # not in its __all__
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)


def host(address: str, size: int, timeout_s: float) -> TCPStore:
    """Open the store where a group of `size` meets, on a free port of `address` and no other.

    Asked for an address alone, torch would listen on all of the host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(128, size))
    return TCPStore(
        address,
        listener.getsockname()[1],
        size,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def visit(address: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Reach the store that another process opened. Raises DistNetworkError, a RuntimeError."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def join(
    store: Store, name: str, *, rank: int, size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Return the group once all are there. Raises RuntimeError when some are not in time."""
    with _blocking_waits():
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],
            backend,
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type, unused-ignore]  # a NewType of str
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Make it so for the group that is made in the block; torch reads the variable then."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def leave(group: dist.ProcessGroup) -> None:
    """Close this process's end; what others wait for over it fails then.

    NCCL's is aborted: to destroy it in peace would wait for all others to do the same.
    """
    if dist.get_backend(group) == "nccl":
        distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)
