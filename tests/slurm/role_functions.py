"""Functions that the executor's tests run as roles, by reference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def add(a: int, b: int) -> int:
    return a + b


def name_node(prefix: str, node: int) -> str:
    print(f"hello from {prefix}")
    return f"{prefix}{node}"


def fail(message: str) -> None:
    raise ValueError(message)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unprintable() -> object:
    return object()


def wait_for_ever(folder: str) -> None:
    """Write the pids of this process and of a child in a session of its own, then wait."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    draft = Path(folder) / "draft"
    draft.write_text(f"{os.getpid()} {child.pid}")
    draft.rename(Path(folder) / "pids")
    time.sleep(600)


def until_term(folder: str) -> str:
    """Return the name of the signal that came."""
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: came.append(number))
    (Path(folder) / "ready").write_text("")
    deadline = time.monotonic() + 240
    while not came:
        if time.monotonic() > deadline:
            raise TimeoutError("no signal came")
        signal.sigtimedwait([], 0.05)
    return signal.Signals(came[0]).name


def submit_and_wait(folder: str) -> None:
    """Be a launcher of its own, for the test that kills it."""
    from slurm.local import HetLocalExecutor

    executor = HetLocalExecutor(folder)
    executor.update_parameters(grace_s=1.0)
    executor.submit({"inference": wait_for_ever}, folder).wait()
