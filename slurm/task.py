"""One task of a role: `python -m slurm.task SUBMISSION ROLE NODE`, started by HetLocalExecutor.

Two processes. The keeper hands signals on, ends the role when the process that launched it is
gone, and leaves nothing behind: whatever the role had started carries a mark in its environment
and is killed once the role has ended. The role itself runs the function and writes its result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurm.files import publish
from slurm.reference import Reference

MARK = "AGENTRL_ROLE_MARK"
"""Environment variable that all processes below one role share."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
KILL_NOW = signal.SIGQUIT
PR_SET_PDEATHSIG = 1
POLL_S = 1.0


class RoleSpec(msgspec.Struct, kw_only=True, frozen=True):
    reference: Reference
    nodes: int = 1


class Submission(msgspec.Struct, kw_only=True, frozen=True):
    """What was submitted: JOBID_submission.json in the executor's folder."""

    job_id: str
    roles: dict[str, RoleSpec]
    path: list[str] = []
    """Import path of the submitting process, so that the same names mean the same modules."""
    grace_s: float = 30.0
    """Time to save that roles have once their launcher is gone."""


def result_path(folder: Path, job_id: str, role: str, node: int) -> Path:
    return folder / f"{job_id}_{role}-{node}_result.json"


def main(argv: list[str]) -> int:
    """Fork the role, then keep it."""
    submission = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Submission)
    return keep(
        lambda: _run(Path(argv[0]).parent, submission, argv[1], int(argv[2])),
        launcher=int(os.environ["AGENTRL_LAUNCHER"]),
        grace_s=submission.grace_s,
    )


def keep(
    role: Callable[[], int],
    *,
    launcher: int,
    grace_s: float,
    held: Collection[signal.Signals] = (),
) -> int:
    """Run `role` in a child, and leave nothing of it behind; return its code, 128+N for signal N.

    It ends, after grace_s to save, when process `launcher` is no more our parent. MARK has to be
    in the environment that this process was started with. held: signals that stay blocked in the
    role until it unblocks them, and so in all that it starts; USR2, if held, reaches it as TERM.
    """
    signals = {*PASSED_ON, KILL_NOW, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _die_with_parent(signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if child:
        renamed = {signal.SIGUSR2: signal.SIGTERM} if signal.SIGUSR2 in held else {}
        names = {number: renamed.get(number, number) for number in signals}
        return _wait(child, launcher, grace_s, names)
    _die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*before, *held})
    if os.getppid() != keeper:  # it died before the request above was in force
        sys.exit(128 + signal.SIGKILL)
    code = role()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # Python ends with its handlers taken out
    sys.exit(code)


def _run(folder: Path, submission: Submission, role: str, node: int) -> int:
    """Call the role's function; write `["success", value]` or `["error", traceback]`."""
    sys.path += [entry for entry in submission.path if entry not in sys.path]
    path = result_path(folder, submission.job_id, role, node)
    try:
        value = submission.roles[role].reference.resolve(node=node)()
        publish(path, _encode("success", value))
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)
        publish(path, _encode("error", text))
        return 1
    return 0


def _encode(outcome: str, value: Any) -> bytes:
    try:
        return json.dumps([outcome, value]).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the role returned {value!r}, which JSON cannot carry: {error}") from error


def _wait(
    role: int, launcher: int, grace_s: float, signals: Mapping[signal.Signals, signal.Signals]
) -> int:
    """Hand signals on, each as what `signals` says, until the role's end; kill what it started."""
    deadline = float("inf")
    while True:
        came = signal.sigtimedwait(signals, POLL_S)
        ended, status = os.waitpid(role, os.WNOHANG)
        if ended:
            break
        if os.getppid() != launcher and deadline == float("inf"):
            deadline = time.monotonic() + grace_s
            os.kill(role, signal.SIGTERM)
        elif came is not None and came.si_signo in PASSED_ON:
            os.kill(role, signals[signal.Signals(came.si_signo)])
        if time.monotonic() > deadline or (came is not None and came.si_signo == KILL_NOW):
            os.kill(role, signal.SIGKILL)
    kill_marked(os.environ[MARK])
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def kill_marked(mark: str, *, rounds: int = 20) -> int:
    """SIGKILL every process, but this one, that inherited `mark`; return how many were found.

    It looks again until none is left, since a process may fork while the others are killed.
    Sandboxes start with an empty environment: bubblewrap ends them with their parent, and who
    plays a role sweeps what that leaves.
    """
    wanted = f"{MARK}={mark}".encode()
    total = 0
    for _ in range(rounds):
        found = [pid for pid in _pids() if _environment_has(pid, wanted)]
        if not found:
            break
        total += len(found)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    return total


def _pids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _environment_has(pid: int, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, a zombie, or another user's
        return False


def _die_with_parent(number: int) -> None:
    """Have the kernel send `number` when the parent dies; elsewhere the keeper's poll sees it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
