"""Work shared out among processes: the numbers of what is to be done lie in a pipe.

Whoever is ready takes the next number, so a slow core does less, and the parent works while its
helpers still import. A helper is `python -m MODULE FOLDER PIPE`; FOLDER holds what it is given and
what it leaves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import RecordError

NUMBER = 4
"""Bytes of a number."""
MOST = 8192
"""Numbers that a pipe takes without a reader: it holds 64 KiB."""


@contextmanager
def shared(module: str, folders: Sequence[Path], many: int) -> Iterator[Iterator[int]]:
    """Run a helper for each folder; yield the numbers from 0 to `many` − 1 that they leave to us.

    All helpers have ended when the block does. Raises RecordError in the words of one that failed.
    """
    with _numbers(many) as pipe, _helpers(module, folders, pipe):
        yield taken(pipe)


@contextmanager
def _numbers(many: int) -> Iterator[int]:
    """Yield the reading end of a pipe that gives 0 to `many` − 1, each once, and then ends."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"".join(i.to_bytes(NUMBER, "big") for i in range(many)))
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def taken(pipe: int) -> Iterator[int]:
    """Take numbers until there is none."""
    while number := os.read(pipe, NUMBER):
        yield int.from_bytes(number, "big")


@contextmanager
def _helpers(module: str, folders: Sequence[Path], pipe: int) -> Iterator[None]:
    running: list[subprocess.Popen[bytes]] = []
    try:
        for folder in folders:
            command = [sys.executable, "-m", module, str(folder), str(pipe)]
            with _words(folder).open("wb") as said:
                running.append(subprocess.Popen(command, stderr=said, pass_fds=[pipe]))
        yield
        for process, folder in zip(running, folders, strict=True):
            if process.wait():
                words = _words(folder).read_text(errors="replace")[-2000:]
                raise RecordError(f"python -m {module} exited {process.returncode}: {words}")
    finally:
        for process in running:
            process.kill()
            process.wait()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _words(folder: Path) -> Path:
    return folder / "stderr"
