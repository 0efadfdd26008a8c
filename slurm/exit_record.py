"""How a role ended, in its own words: attempts/NNNN/exit/ROLE-NODE.json.

The launcher decides on these and never on a return code alone: srun's codes lie, and a code
cannot say why. A role that was killed has written none, so one is made up for it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback as tracebacks
from pathlib import Path

import msgspec

from agentrl.errors import (
    NEVER_MENDS,
    InfraError,
    Interrupted,
    LaunchError,
    RecordError,
    TooManyInfraFailures,
    WaitTimeout,
)
from slurm.files import listed, publish

DONE, FAILED, USAGE, SAVED = 0, 1, 2, 75
"""Exit codes of every command and role; 75 is sysexits' EX_TEMPFAIL, "try again"."""
CAUSES = ("done", "saved", "usage", "infra_limit", "launch", "infra", "failed", "killed")
TRACEBACK_BYTES = 8000


class ExitRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One end of one role's process on one node."""

    role: str
    node: int
    code: int
    cause: str
    """One of CAUSES. `infra` and `killed` are not the program's doing; `usage` never mends."""
    message: str = ""
    traceback: str = ""
    """Its tail, where the error is."""
    step: int = 0
    """Step of the newest checkpoint when the role ended."""
    host: str = ""
    started: float = 0.0
    ended: float = 0.0
    is_synthesised: bool = False
    """The role left no record of its own."""

    @property
    def is_infra(self) -> bool:
        return self.cause in ("infra", "killed", "launch")


def classify(error: BaseException) -> tuple[int, str]:
    """Return (exit code, cause) of what a role raised."""
    if isinstance(error, Interrupted):
        return SAVED, "saved"
    if isinstance(error, NEVER_MENDS):
        return USAGE, "usage"
    if isinstance(error, TooManyInfraFailures):
        return FAILED, "infra_limit"
    if isinstance(error, LaunchError):
        return FAILED, "launch"
    if isinstance(error, InfraError | WaitTimeout | OSError | MemoryError):
        return FAILED, "infra"
    return FAILED, "failed"


def from_code(role: str, node: int, code: int, *, step: int, started: float) -> ExitRecord:
    """Record that a role returned `code` of its own will."""
    cause = {DONE: "done", SAVED: "saved", USAGE: "usage"}.get(code, "failed")
    return _record(role, node, code, cause, step=step, started=started)


def from_error(
    role: str, node: int, error: BaseException, *, step: int, started: float
) -> ExitRecord:
    """Record what a role raised."""
    code, cause = classify(error)
    text = "".join(tracebacks.format_exception(error))
    return _record(
        role,
        node,
        code,
        cause,
        step=step,
        started=started,
        message=str(error) or type(error).__name__,
        traceback=text[-TRACEBACK_BYTES:],
    )


def synthesise(role: str, node: int, returncode: int, *, step: int, started: float) -> ExitRecord:
    """Make the record of a role that left none, from its process's return code.

    `returncode` is subprocess's (−9) or a shell's (137). A role that ends without a record has
    been killed, whatever it returned, unless it returned a code of its own choice.
    """
    number = -returncode if returncode < 0 else returncode - 128
    if number in {item.value for item in signal.Signals}:
        name = signal.Signals(number).name
        return _record(
            role,
            node,
            128 + number,
            "killed",
            step=step,
            started=started,
            message=f"{role} on node {node} was killed by {name} and left no exit record",
            is_synthesised=True,
        )
    return _record(
        role,
        node,
        returncode or FAILED,
        "failed",
        step=step,
        started=started,
        message=f"{role} on node {node} exited {returncode} and left no exit record; see its log",
        is_synthesised=True,
    )


def path_of(attempt: Path, role: str, node: int) -> Path:
    return attempt / "exit" / f"{role}-{node}.json"


def write(attempt: Path, record: ExitRecord) -> Path:
    """Publish `record` under the launch attempt's folder."""
    path = path_of(attempt, record.role, record.node)
    publish(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return path


def read(attempt: Path, role: str, node: int) -> ExitRecord | None:
    """Return the role's record, or None where it left none. Raises RecordError if it is torn."""
    path = path_of(attempt, role, node)
    if not listed(path):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitRecord)
    except msgspec.DecodeError as error:
        raise RecordError(
            f"exit record {path}: not readable: {error}; see the role's log"
        ) from error


def set_aside(attempt: Path, role: str, node: int) -> None:
    """Move the record of an earlier process to ROLE-NODE.TRY.json, so that the next can write."""
    path = path_of(attempt, role, node)
    if not listed(path):
        return
    earlier = len(list(path.parent.glob(f"{role}-{node}.*.json")))
    path.rename(path.with_name(f"{role}-{node}.{earlier + 1}.json"))


def restarts(attempt: Path) -> int:
    """Count the records that were set aside: the roles that were started again."""
    folder = attempt / "exit"
    names = os.listdir(folder) if folder.is_dir() else []
    return sum(name.endswith(".json") and name.count(".") == 2 for name in names)


def _record(role: str, node: int, code: int, cause: str, **rest: object) -> ExitRecord:
    facts = {"role": role, "node": node, "code": code, "cause": cause, **rest}
    facts |= {"host": socket.gethostname().split(".")[0], "ended": time.time()}
    return msgspec.convert(facts, ExitRecord)
