"""Processes that outlive the one that started them: known by pid, start time and boot."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl.errors import WaitTimeout

POLL_S, MOST_POLL_S = 0.02, 0.25
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process, not to be mistaken for a later one of the same number."""

    pid: int
    started: int
    """Clock ticks after the boot, as in /proc/PID/stat."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now. Raises OSError without one."""
        return cls(pid=pid, started=int(_stat(pid)[19]), boot=_boot())

    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not, and is reaped if it is our own child."""
        try:
            stat = _stat(self.pid)
        except OSError:
            return False
        if int(stat[19]) != self.started or self.boot != _boot():
            return False
        if stat[0] == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        return stat[0] not in "ZX"

    def is_dead(self) -> bool:
        return not self.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this very process; nothing happens where it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_alive():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)


def spawn(command: Sequence[str], env: Mapping[str, str], log: Path, *, stdin: int) -> Process:
    """Start a process that outlives this one, in a session of its own, its output added to `log`.

    stdin: a file descriptor.
    """
    with log.open("ab") as file:
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number in (1, 2)]
        return Process.of(
            os.posix_spawnp(command[0], list(command), env, file_actions=actions, setsid=True)
        )


def wait_for(look: Callable[[], Answer | None], limit_s: float, what: str) -> Answer:
    """Return the first true answer of `look`. Raises WaitTimeout after `limit_s`.

    It looks less and less often: what asks a daemon would slow what it waits for.
    """
    deadline, pause_s = time.monotonic() + limit_s, POLL_S
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {limit_s:g} s for {what}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, MOST_POLL_S)
    return answer


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def in_networks(inodes: Iterable[int]) -> list[Process]:
    """Return the processes whose network namespace is one of these."""
    wanted = frozenset(inodes)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(entry / "ns" / "net").st_ino in wanted:
                found.append(Process.of(int(entry.name)))
    return found


def ancestry(pid: int) -> list[int]:
    """Return `pid` and the processes that it descends from."""
    line = [pid]
    with contextlib.suppress(OSError):
        while parent := int(_stat(line[-1])[1]):
            line.append(parent)
    return line


def command_line(process: Process) -> str:
    """Return `PID COMMAND …`, for a person."""
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    return f"{process.pid} {b' '.join(words).decode(errors='replace').strip()}".strip()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, …, start time (19th)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
