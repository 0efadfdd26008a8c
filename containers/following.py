"""Run a program, hear it line by line, and leave nothing of it running, whatever ends us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 30.0
"""What a build has to take down its mounts and its temporary files; then it is killed."""
POLL_S = 0.05


def follow(words: Sequence[str], env: Mapping[str, str], hear: Callable[[str], None]) -> int:
    """Run `words`, hand each line of both its streams to `hear`; return its exit code.

    The first of Ctrl-C, SIGTERM and SIGHUP ends the program and all of its process group, then
    raises KeyboardInterrupt; more of them change nothing. What `hear` raises ends it too.
    """
    with (
        interruptible(),
        subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # its group is ours to end, and a terminal's Ctrl-C comes once
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                hear(line.rstrip())
            return process.wait()
        except BaseException:
            _end(process)
            raise


def run(words: Sequence[str]) -> int:
    """Run `words` with our own streams; return the exit code. A signal to us ends it by TERM."""
    with interruptible(), subprocess.Popen(words) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make the first signal of ENDING a KeyboardInterrupt; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_once(number: int, frame: FrameType | None) -> None:
        del frame
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] != signal.SIG_IGN:  # nohup asked for that
            signal.signal(number, raise_once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[str]) -> None:
    """TERM to the program's group, since SIGKILL would leave its mounts; KILL after GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE_S)  # unread words would hold it up
    while _signal_group(process.pid, 0) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group, 0 for none; return whether there was such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
