"""The program that is pid 1 of a sandbox: it confines itself, then runs commands one at a time.

It is sent, with those modules of ours that it needs, to the sandbox's own Python (`-I -S`), and
imports little else: each import is paid at every start. Requests come as frames on stdin, replies
leave as frames on stdout; the end of stdin is the end of the sandbox.
"""

from __future__ import annotations

import os
import resource
import select
import time

from agentrl.sandbox.bounded import Bounded
from agentrl.sandbox.confine import (
    adopt_orphans,
    build_root,
    drop_privileges,
    guard_first_process,
    set_limits,
)
from agentrl.sandbox.frames import pack, unpack

MEMORY_WORDS = (b"MemoryError", b"Cannot allocate memory", b"bad_alloc", b"out of memory")
TICK_S = 0.1
"""How often a running command's process count is looked at, and orphans are reaped."""
DRAIN_BYTES = 1 << 20
MAX_LEFTOVERS = 64
"""Pipes of background children that are kept open; the oldest goes first."""
SIGKILL = 9
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Executor:
    """Runs one command at a time and knows every process that it may end."""

    def __init__(
        self,
        *,
        is_init: bool,
        shell: str,
        processes: int,
        cpu_s: int,
        total_mb: int,
        mark: bytes = b"",
    ) -> None:
        """mark: `NAME=value` in the environment of all that belongs to this sandbox, for an
        executor that is not the ancestor of what earlier commands left.
        """
        self.is_init = is_init
        self.mark = mark
        self.processes = processes
        self.cpu_s = cpu_s
        self.total_mb = total_mb
        is_bash = shell == "bash" and os.path.exists("/bin/bash")
        self.shell = "/bin/bash" if is_bash else "/bin/sh"
        self.leftovers: list[int] = []
        """Read ends of pipes that background children still hold."""

    def others(self) -> list[int]:
        """Return the pids of all processes of this sandbox but this one."""
        me = os.getpid()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.is_init:
            return [pid for pid in pids if pid != me]
        if self.mark:
            return [pid for pid in pids if pid != me and self.mark in environment(pid)]
        parents = {pid: parent_of(pid) for pid in pids}
        found, grew = {me}, True
        while grew:
            new = {pid for pid, parent in parents.items() if parent in found and pid not in found}
            found |= new
            grew = bool(new)
        return sorted(found - {me})

    def kill_all(self) -> None:
        """SIGKILL everything until nothing is left, and reap it."""
        while True:
            try:
                if self.is_init:
                    os.kill(-1, SIGKILL)
                else:
                    for pid in self.others():
                        os.kill(pid, SIGKILL)
            except ProcessLookupError:
                pass
            try:
                while os.waitpid(-1, 0 if self.is_init else os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                if not (self.mark and self.others()):
                    break
            time.sleep(0.001)
        self.close_leftovers()

    def close_leftovers(self) -> None:
        for fd in self.leftovers:
            os.close(fd)
        self.leftovers = []

    def tend(self) -> str:
        """Empty left pipes; past a bound that no rlimit sets end everything and say which."""
        for fd in list(self.leftovers):
            try:
                if not os.read(fd, 65536):
                    self.leftovers.remove(fd)
                    os.close(fd)
            except BlockingIOError:
                pass
        passed = self.passed_bound(self.others())
        if passed:
            self.kill_all()
        return passed

    def passed_bound(self, pids: list[int]) -> str:
        if len(pids) > self.processes:
            return f"more than {self.processes} processes"
        if self.total_mb and sum(map(resident_mb, pids)) > self.total_mb:
            return f"more than {self.total_mb} MiB of memory together"
        return ""

    def reap(self) -> dict[int, int]:
        """Collect what has ended: pid → exit code. Never blocks."""
        ended = {}
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            pass
        return ended

    def spawn(self, command: bytes, env: dict[bytes, bytes]) -> tuple[int, int]:
        """Start the shell in its own session; return its pid and the read end of its output."""
        reader, writer = os.pipe()
        try:
            pid = os.posix_spawn(
                self.shell,
                [b"sh" if self.shell == "/bin/sh" else b"bash", b"-c", command],
                {**os.environb, **env},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writer, 1),
                    (os.POSIX_SPAWN_DUP2, writer, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[2, 3, 13, 15, 17, 25],
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        if self.cpu_s:
            resource.prlimit(pid, resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s + 1))
        os.set_blocking(reader, False)
        return pid, reader

    def run(
        self, command: bytes, timeout_s: float, limit: int, env: dict[bytes, bytes]
    ) -> list[bytes]:
        """Run one command; return the fields of its reply."""
        began = time.monotonic()
        try:
            pid, reader = self.spawn(command, env)
        except (OSError, ValueError) as error:  # too long, no process left, a NUL in `env`
            text = f"cannot start a shell: {error}".encode()
            return [b"exec", text, b"126", b"0", b"0", b"0", b"0"]
        kept = Bounded(limit)
        code, why = self.watch(pid, reader, kept, began + timeout_s)
        if why != "lived":
            self.kill_all()
        seconds = time.monotonic() - began
        self.drain(reader, kept)
        output = kept.value()
        oom = why.endswith("together")
        if why == "lived" and code != 0:
            oom = code == 137 or any(words in output for words in MEMORY_WORDS)
        elif why not in ("lived", "timeout"):
            output += b"\n[killed: %b]\n" % why.encode()
        flags = [b"1" if flag else b"0" for flag in (why == "timeout", kept.elided, oom)]
        return [b"exec", output, str(code).encode(), *flags, repr(seconds).encode()]

    def watch(self, pid: int, reader: int, kept: Bounded, deadline: float) -> tuple[int, str]:
        """Read output until the shell ends: its exit code, and `lived`, `timeout` or a bound."""
        poll = select.poll()
        pidfd = os.pidfd_open(pid)
        try:
            for fd in (0, reader, pidfd):
                poll.register(fd, select.POLLIN)
            tick_s = TICK_S if self.is_init else 5 * TICK_S  # the host's /proc is long
            tick = time.monotonic() + tick_s
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return -1, "timeout"
                if now >= tick:
                    if pid in (ended := self.reap()):
                        return exit_code(ended[pid]), "lived"
                    if passed := self.tend():
                        return 137, passed
                    tick = now + tick_s
                ready = dict(poll.poll(max(1, int((min(deadline, tick) - now) * 1000))))
                if 0 in ready:
                    raise EOFError  # one request at a time: this can only be the end of stdin
                if reader in ready and not self.take(reader, kept):
                    poll.unregister(reader)
                if pidfd in ready:
                    return exit_code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), "lived"
        finally:
            os.close(pidfd)

    def take(self, reader: int, kept: Bounded) -> bool:
        """Move one read from the pipe to `kept`; return whether the pipe is still open."""
        try:
            data = os.read(reader, 65536)
        except BlockingIOError:
            return True
        kept.add(data)
        return bool(data)

    def drain(self, reader: int, kept: Bounded) -> None:
        """Take what is in the pipe already; keep the pipe for children that still hold it."""
        for _ in range(DRAIN_BYTES // 65536):
            try:
                data = os.read(reader, 65536)
            except BlockingIOError:
                break
            if not data:
                os.close(reader)
                return
            kept.add(data)
        self.leftovers.append(reader)
        if len(self.leftovers) > MAX_LEFTOVERS:
            os.close(self.leftovers.pop(0))

    def put(self, path: str, data: bytes) -> list[bytes]:
        """Write a regular file at `path`, whatever a command has put in its place."""
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        if os.path.islink(path) or not (os.path.isfile(path) and os.access(path, os.W_OK)):
            if not os.access(folder, os.W_OK | os.X_OK):
                os.chmod(folder, 0o755)
            if os.path.lexists(path):
                os.unlink(path)
        with open(path, "wb") as file:
            file.write(data)
        return [b"put"]

    def get(self, path: str, limit: int) -> list[bytes]:
        if not os.path.isfile(path):  # a pipe or device would hold the executor for ever
            raise FileNotFoundError(2, "No such file", path)
        with open(path, "rb") as file:
            return [b"get", file.read(limit)]

    def answer(self, fields: list[bytes]) -> list[bytes]:
        """Do what one request asks; errors of the file system are answers."""
        verb = fields[0]
        try:
            if verb == b"exec":
                pairs = {fields[at]: fields[at + 1] for at in range(4, len(fields), 2)}
                return self.run(fields[1], float(fields[2]), int(fields[3]), pairs)
            if verb == b"put":
                return self.put(os.fsdecode(fields[1]), fields[2])
            if verb == b"take":
                with open(source := os.fsdecode(fields[2]), "rb") as file:
                    data = file.read()
                os.unlink(source)
                return self.put(os.fsdecode(fields[1]), data)
            if verb == b"get":
                return self.get(os.fsdecode(fields[1]), int(fields[2]))
            if verb == b"stop":
                self.kill_all()
                return [b"stop"]
            return [b"error", b"unknown request %b" % verb]
        except (FileNotFoundError, NotADirectoryError) as error:
            return [b"missing", str(error).encode()]
        except (OSError, ValueError) as error:
            return [b"error", str(error).encode()]

    def serve(self) -> None:
        """Answer requests until stdin ends; then end everything."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        try:
            while True:
                while not poll.poll(1000 if self.is_tending() else -1):
                    self.reap()
                    self.tend()
                self.reap()
                body = read_exactly(int.from_bytes(read_exactly(4), "big"))
                send(self.answer(unpack(body)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self.kill_all()

    def is_tending(self) -> bool:
        """Whether a child of an earlier command lives, so that idle time needs looking after."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return bool(self.leftovers)
        return True


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def resident_mb(pid: int) -> float:
    """Return a process's resident memory, MiB; pages that it shares count for each."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_MB
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def exit_code(code: int) -> int:
    """As a shell says it: death by signal N is 128 + N."""
    return code if code >= 0 else 128 - code


def read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def send(fields: list[bytes]) -> None:
    data = memoryview(pack(fields))
    while data:
        data = data[os.write(1, data) :]


def main(argv: list[str]) -> None:
    """argv: kind (`init`, `container`, `host`), shell (`bash`, `sh`), whether RLIMIT_NPROC bounds,
    whether to copy the testbed, memory_mb, cpu_s, processes, file_mb, total_memory_mb; for `host`
    also the testbed's folder.
    """
    import _signal  # type: ignore[import-not-found]  # `signal` would import enum

    kind, shell = argv[:2]
    by_rlimit, copy, memory_mb, cpu_s, processes, file_mb, total_mb = map(int, argv[2:9])
    # pid 1 is immune to signals that have no handler, and Python has set one for SIGINT
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_IGN if kind == "host" else _signal.SIG_DFL)
    how = b"copy"
    if kind == "init":
        how = build_root(bool(copy), processes)
        drop_privileges()
        guard_first_process()
        os.chdir("/testbed")
    elif kind == "container":
        from agentrl.sandbox.enclose import enter

        how = enter(bool(copy))
        os.chdir("/testbed")
    else:
        os.chdir(argv[9])
        adopt_orphans()
    set_limits(memory_mb, file_mb, processes + 1 if by_rlimit else 0)
    silent = os.open("/dev/null", os.O_WRONLY)
    os.dup2(silent, 2)
    os.close(silent)
    send([b"ready", how])
    is_init = kind != "host"
    Executor(
        is_init=is_init, shell=shell, processes=processes, cpu_s=cpu_s, total_mb=total_mb
    ).serve()
    os._exit(0)  # no clean-up of the interpreter: it is a part of every start's cost
