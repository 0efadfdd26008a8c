"""One engine's process group: started, watched, killed whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_BYTES = 4000


class EngineProcess:
    """The leader of a process group of its own; its output is appended to `log`.

    Our end of its standard input is what ties it to us: the server ends when that closes.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(
        cls, command: Sequence[str], log: Path, *, environ: Mapping[str, str] | None = None
    ) -> EngineProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=None if environ is None else dict(environ),
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL the group, and wait until its leader is reaped."""
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def tail(log: Path, *, max_bytes: int = TAIL_BYTES) -> str:
    """Return the last lines of `log`."""
    if not log.is_file():
        return "(no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - max_bytes))
        return file.read().decode(errors="replace").strip() or "(empty log)"
