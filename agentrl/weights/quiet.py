"""The trainer says while it writes a checkpoint or a version: no engine is restarted then.

A restart reads gigabytes from the filesystem that the trainer is writing to.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import PublishError
from agentrl.handoff.publish import publish_json

QUIET = "CHECKPOINTING.json"
LONGEST_S = 600.0
"""After which a trainer that never took its word back is taken to be dead."""

_lock = threading.Lock()
_writing: defaultdict[Path, list[float]] = defaultdict(list)
"""Until when each open block may last: a thread may write a checkpoint while a version is."""


@contextmanager
def quiet(weights: Path, *, longest_s: float = LONGEST_S) -> Iterator[None]:
    """Announce in the run's folder of weights that the trainer writes, while the block lasts.

    Raises PublishError where the disk refuses even that.
    """
    until = time.time() + longest_s
    try:
        with _lock:
            latest = max([until, *_writing[weights]])
            publish_json(weights / QUIET, {"until": latest, "pid": os.getpid()})
            _writing[weights].append(until)
    except OSError as error:
        raise PublishError(
            f"saying in {weights / QUIET} that the trainer writes: {error}. Free space there, "
            "then resume the run"
        ) from error
    try:
        yield
    finally:
        with _lock:
            _writing[weights].remove(until)
            if not _writing[weights]:
                (weights / QUIET).unlink(missing_ok=True)


def is_quiet(weights: Path) -> bool:
    """Whether a trainer announced that it writes, and may still do so."""
    if not weights.is_dir() or QUIET not in os.listdir(weights):
        return False
    try:
        return time.time() < float(json.loads((weights / QUIET).read_bytes())["until"])
    except FileNotFoundError:
        return False
