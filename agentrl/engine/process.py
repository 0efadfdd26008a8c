"""One engine's process group: started, watched, killed whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

log = logging.getLogger(__name__)
TAIL_BYTES = 4000
LOG_PIECE = 1 << 17
"""Bytes at a time: a storm of errors takes most of a second for a MiB, and others wait."""
KILL_S = 10.0
"""Longest wait for killed processes: one in the driver (state D) dies when that lets go."""
COMPILERS = frozenset({"ptxas", "cicc", "nvcc", "cudafe++", "hipcc", "clang", "ninja", "ld.lld"})


class EngineProcess:
    """The leader of a process group of its own; its output is appended to `log`.

    Our end of its standard input is what ties it to us: the server ends when that closes.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path, *, log_start: int) -> None:
        self._process = process
        self.log = log
        self._read_to = log_start
        self._is_blind = False
        """The log could not be read the last time."""

    @classmethod
    async def start(
        cls, command: Sequence[str], log: Path, *, environ: Mapping[str, str] | None = None
    ) -> EngineProcess:
        """Raises OSError, as where the log's disk is full: servers die of that without a word."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            file.write(time.strftime("-- started %Y-%m-%d %H:%M:%S\n").encode())
            log_start = file.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=None if environ is None else dict(environ),
            )
        return cls(process, log, log_start=log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def read_log(self) -> str:
        """Return what this process wrote since the last call.

        Nothing where the log cannot be read, as on a shared filesystem that stumbles: an engine is
        watched in other ways too. One that was cut short is read from its start.
        """
        try:
            with self.log.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_to:
                    self._read_to = 0
                file.seek(self._read_to)
                piece = file.read(LOG_PIECE)
        except OSError as error:
            log.log(logging.DEBUG if self._is_blind else logging.WARNING, "no log: %s", error)
            self._is_blind = True
            return ""
        self._is_blind = False
        self._read_to += len(piece)
        return piece.decode(errors="replace")

    def is_compiling(self) -> bool:
        """Whether a compiler of GPU kernels runs below this process."""
        return any(_name(child) in COMPILERS for child in self._below())

    async def kill(self) -> None:
        """SIGKILL the group and what left it; wait until all of it is gone, at most KILL_S."""
        below = self._below()  # a scheduler that called setsid is not of the group
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        _, left = await asyncio.to_thread(psutil.wait_procs, below, KILL_S)
        if left:
            log.warning("processes %s do not die: the driver holds them", [one.pid for one in left])

    def _below(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def tail(log: Path, *, max_bytes: int = TAIL_BYTES) -> str:
    """Return the last lines of `log`."""
    if not log.is_file():
        return "(no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - max_bytes))
        return file.read().decode(errors="replace").strip() or "(empty log)"
