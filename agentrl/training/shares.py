"""A checkpoint's tensors as all ranks write them at once: each its share, in files of its own.

A share is whole tensors, every size-th of them, under the names that transformers has: a checkpoint
can be read with any number of ranks, any cut, the other back end, or transformers itself, and no
file of it is pickled (the index of torch's own distributed format is). A share is copied to the
CPU before training goes on, and written by a thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import CheckpointError, PublishError
from agentrl.handoff.publish import publish_json
from agentrl.training.backend import BackendState, Part

log = logging.getLogger(__name__)
POLL_S = 0.05
HASHERS = min(8, os.cpu_count() or 1)
KINDS = ("model", "optimizer")


def file_name(kind: str, part: Part) -> str:
    """Return `model.safetensors` for one rank, `model-00002-of-00008.safetensors` for one of 8."""
    share = f"-{part.rank + 1:05d}-of-{part.size:05d}" if part.size > 1 else ""
    return f"{kind}{share}.safetensors"


def write_share(folder: Path, state: BackendState, part: Part) -> None:
    """Write this rank's tensors into `folder`, then the note that says so, or why not."""
    note: dict[str, Any] = {}
    try:
        for kind in KINDS:
            tensors = {name: one.contiguous() for name, one in getattr(state, kind).items()}
            path = folder / file_name(kind, part)
            save_file(tensors, path, metadata={"format": "pt"})
            note[path.name] = {**entry(path), "tensors": sorted(tensors) if kind == "model" else []}
    except (OSError, SafetensorError) as error:
        for name in note:  # makes room for what says so
            (folder / name).unlink(missing_ok=True)
        note = {"error": f"rank {part.rank}: {error}"}
    publish_json(folder / _note_name(part.rank), note)


class ShareWriter:
    """Writes one share after the other, in a thread.

    A disk that hangs holds its thread for as long as it likes: nobody waits for that longer than
    `limit_s`, nor the process for the thread when it ends.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: Future[Any] | None = None

    def __enter__(self) -> ShareWriter:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._last is not None:
            futures.wait([self._last], self._limit_s)

    def begin(self, work: Callable[[], Any]) -> None:
        self.end(self._limit_s)
        self._last = Future()
        thread = threading.Thread(target=_settle, args=(self._last, work), daemon=True)
        thread.start()

    @property
    def is_done(self) -> bool:
        return self._last is None or self._last.done()

    def end(self, limit_s: float) -> Any:
        """Return what the last work came to, once it has ended; None when there was none.

        Raises what it raised, and PublishError when it takes longer than the limit.
        """
        last, self._last = self._last, None
        try:
            return last.result(limit_s) if last else None
        except TimeoutError as error:
            raise PublishError(
                f"the checkpoint that was begun is not written after {limit_s:g} s; its disk is "
                "slow or stuck: look there, or raise training.checkpoint_timeout_s"
            ) from error


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def await_shares(folder: Path, size: int, limit_s: float) -> dict[str, dict[str, Any]]:
    """Return the entries of all ranks' files, their notes removed.

    Raises PublishError for a rank that could not write, or has not within the limit.
    """
    deadline = time.monotonic() + limit_s
    wanted = {_note_name(rank): rank for rank in range(size)}
    while not wanted.keys() <= (present := set(os.listdir(folder))):
        if time.monotonic() > deadline:
            absent = ", ".join(str(wanted[name]) for name in sorted(wanted.keys() - present))
            raise PublishError(
                f"{folder}: after {limit_s:g} s rank {absent} has not written its share"
            )
        time.sleep(POLL_S)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(wanted):
        note = json.loads((folder / name).read_bytes())
        if "error" in note:
            raise PublishError(str(note["error"]))
        found |= note
        (folder / name).unlink()
    return found


def entry(path: Path) -> dict[str, Any]:
    """Return a file's size and sha256, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def digests(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file's sha256; several are read at once."""
    with ThreadPoolExecutor(HASHERS, "sha256") as pool:
        yield from zip(paths, pool.map(_sha256, paths), strict=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Tensors(Mapping[str, Tensor]):
    """The tensors of all ranks' files of one kind, each read when it is asked for."""

    where: Mapping[str, Any]
    """The open file of each name."""

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def read_tensors(folder: Path, kind: str, names: Iterable[str]) -> Tensors:
    """Open the files of `kind` among `names`. Raises CheckpointError."""
    pattern = re.compile(rf"{kind}(-\d+-of-\d+)?\.safetensors")
    files = [name for name in sorted(names) if pattern.fullmatch(name)]
    if not files:
        raise CheckpointError(f"{folder}: no file of the {kind}'s tensors in its manifest")
    where: dict[str, Any] = {}
    for file in files:
        opened: Any = safe_open(folder / file, framework="pt")
        where |= dict.fromkeys(opened.keys(), opened)
    return Tensors(where)


def _note_name(rank: int) -> str:
    return f"share-{rank:05d}.json"
