"""The daemons of one cluster: a record each in its directory, so that any process may end them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import ClusterError, WaitTimeout
from slurm.files import publish
from slurm.lab_process import Process, ancestry, command_line, in_networks, spawn, wait_for

START_S = 120.0
"""Longest wait for a start: a busy machine is slow, while a dead daemon is told at once."""
END_S = 30.0
TAIL_BYTES = 1000
Answer = TypeVar("Answer")


class Daemons:
    """Processes by name; NAME.part belongs to NAME and shares its log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "log"
        self._records = directory / "processes"

    def living(self) -> dict[str, Process]:
        return {name: process for name, process in self._known().items() if process.is_alive()}

    def ended(self) -> list[str]:
        """Return the names of those that have ended although nobody asked."""
        dead = [name for name, process in self._known().items() if process.is_dead()]
        return sorted({name.partition(".")[0] for name in dead})

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, stdin: int | None = None
    ) -> Process:
        """Start a daemon that outlives this process, its output in log/NAME."""
        with open(os.devnull) as nothing:
            end = nothing.fileno() if stdin is None else stdin
            return self.remember(name, spawn(command, env, self.logs / name, stdin=end))

    def remember(self, name: str, process: Process) -> Process:
        publish(self._records / name, msgspec.json.encode(process))
        return process

    def kill(self, name: str) -> None:
        """SIGKILL a daemon and its parts, and forget them."""
        for part, process in self.living().items():
            if part.partition(".")[0] == name:
                process.send(signal.SIGKILL)
                wait_for(process.is_dead, END_S, f"the end of {part}")
        self._forget(name)

    def stop_gently(self, name: str) -> None:
        """SIGTERM, and some time to end; nothing where it does not run."""
        if process := self.living().get(name):
            process.send(signal.SIGTERM)
            with contextlib.suppress(WaitTimeout):
                wait_for(process.is_dead, END_S, f"the end of {name}")

    def end_all(self) -> list[str]:
        """SIGKILL every daemon and all else in their networks; return a line for each left.

        Never the calling process, nor those it descends from.
        """
        with self._networks() as inodes:

            def found() -> list[Process]:
                return [*in_networks(inodes), *self.living().values()]

            spared = set(ancestry(os.getpid()))

            def is_done() -> bool:
                rest = [process for process in found() if process.pid not in spared]
                for process in rest:
                    process.send(signal.SIGKILL)
                return not rest

            with contextlib.suppress(WaitTimeout):
                wait_for(is_done, END_S, "the end of all processes")
            left = {process.pid: process for process in found() if process.pid != os.getpid()}
        for name in self.ended():
            self._forget(name)
        return [command_line(process) for process in left.values()]

    def wait_for(
        self, look: Callable[[], Answer | None], what: str, *, needed: Sequence[str]
    ) -> Answer:
        """Return the first true answer; raise at once, with its log, if a needed daemon ended.

        Raises ClusterError then, and after START_S.
        """

        def look_at_daemons_first() -> Answer | None:
            for name in self.ended():
                if name in needed:
                    raise ClusterError(
                        f"{name} has ended while waiting for {what}; {self.tail(name)}"
                    )
            return look()

        try:
            return wait_for(look_at_daemons_first, START_S, what)
        except WaitTimeout as error:
            raise ClusterError(f"{error}; {self.tail(needed[-1])}") from error

    def tail(self, name: str) -> str:
        """Return where the log of a daemon is, and its end."""
        path = self.logs / name
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"the end of {path}:\n{text[-TAIL_BYTES:].strip() or '(nothing)'}"

    def _known(self) -> dict[str, Process]:
        found = {}
        for path in self._records.glob("[!.]*"):
            with contextlib.suppress(FileNotFoundError):  # another process ends them too
                found[path.name] = msgspec.json.decode(path.read_bytes(), type=Process)
        return found

    def _forget(self, name: str) -> None:
        for part in self._known():
            if part.partition(".")[0] == name:
                (self._records / part).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _networks(self) -> Iterator[list[int]]:
        """Yield the inodes of the daemons' network namespaces, which no other gets meanwhile."""
        with contextlib.ExitStack() as held:
            inodes = []
            for process in self.living().values():
                with contextlib.suppress(OSError):
                    handle = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
                    held.callback(os.close, handle)
                    inodes.append(os.fstat(handle).st_ino)
            yield inodes


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold `path` for this process. Raises ClusterError while another living one holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.encode(Process.of(os.getpid())))
    try:
        if path.exists() and msgspec.json.decode(path.read_bytes(), type=Process).is_dead():
            path.unlink()
        os.link(draft, path)  # whole, and by one process only
    except FileExistsError as error:
        raise ClusterError(
            f"a cluster is being booted in {path.parent} by another process, which {path} names; "
            "wait for it, or give another --dir"
        ) from error
    finally:
        draft.unlink()
    try:
        yield
    finally:
        path.unlink()
