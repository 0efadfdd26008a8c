"""The CURVE keys of one launch attempt, in a file that its owner alone may read.

The trainer makes it in the attempt's folder, and all roles of the attempt read it: who cannot read
the run's private files cannot speak with its trainer, nor pose as it.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from pathlib import Path

import msgspec
import zmq

from agentrl.errors import HandoffError
from agentrl.handoff.publish import fsync_folder

FILE = "handoff.key"
MODE = 0o600
Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes as text: https://rfc.zeromq.org/spec/32."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Public and secret half of one side's key."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        if not (Z85.fullmatch(self.public) and Z85.fullmatch(self.secret)):
            raise ValueError("a key must be 40 characters of Z85")

    def __repr__(self) -> str:
        return f"Pair(public={self.public!r}, secret=…)"

    @classmethod
    def make(cls) -> Pair:
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of the trainer, and those that its workers share."""

    trainer: Pair
    worker: Pair

    @classmethod
    def make(cls) -> Keys:
        return cls(trainer=Pair.make(), worker=Pair.make())


def obtain(attempt_dir: Path) -> Keys:
    """Return the attempt's keys; a trainer's first process makes them, a restarted one reads them.

    Raises HandoffError as `read` does.
    """
    attempt_dir.mkdir(parents=True, exist_ok=True)
    path = attempt_dir / FILE
    if FILE not in os.listdir(attempt_dir):
        write(path, Keys.make())
    return read(path)


def write(path: Path, keys: Keys) -> None:
    """Publish `keys`; at no moment does anybody but the owner have the right to read them."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(keys))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def read(path: Path) -> Keys:
    """Read `path`. Raises HandoffError if anybody else may read or change it, or owns it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise HandoffError(f"keys {path}: {error.strerror}; the trainer makes this file") from error
    with os.fdopen(handle, "rb") as file:
        _check(path, os.fstat(handle))
        data = file.read()
    try:
        return msgspec.json.decode(data, type=Keys)
    except msgspec.DecodeError as error:
        raise HandoffError(f"keys {path}: {error}; not what a trainer writes") from error


def _check(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or mode & ~MODE:
        raise HandoffError(
            f"keys {path}: mode is {mode:04o}, must be {MODE:04o} of a plain file: others could "
            "read the keys. Remove it and start again; on a filesystem without modes take "
            "handoff=files"
        )
    if found.st_uid != os.geteuid():
        raise HandoffError(
            f"keys {path}: owned by user {found.st_uid}, this is user {os.geteuid()}; run all "
            "roles as one user"
        )
