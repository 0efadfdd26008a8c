"""What a rollout process knows of the trainer and the engines, from the files they publish."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.errors import RecordError
from agentrl.handoff.publish import publish_json
from agentrl.rollout.draws import DrawSet
from agentrl.weights.version import Announced, Stamp, latest, latest_stamp

POLL_S = 0.1
LONGEST_POLL_S = 2.0
PATIENCE = 50
"""The next announcement is looked for after a fiftieth of the time since the last: dozens of
processes ask one shared filesystem, and where steps take minutes seconds are soon enough."""
TROUBLE_S = 30.0
"""How long an unreadable LATEST.json is borne: a resuming trainer replaces folders under it."""


class TrainerView:
    """The newest announcement of this launch attempt's trainer, looked for every POLL_S or less."""

    def __init__(
        self, weights: Path, *, attempt: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._weights = weights
        self._attempt = attempt
        self._clock = clock
        self._next = 0.0
        self._changed = clock()
        self._stamp: Stamp | None = None
        self._trouble_since: float | None = None
        self._consumed: tuple[list[list[int]], DrawSet] = ([], DrawSet())
        self.announced: Announced | None = None
        """None until the trainer of this launch attempt has announced something."""

    def refresh(self) -> Announced | None:
        """Look again when it is time. Raises RecordError when it stays unreadable."""
        now = self._clock()
        if now < self._next:
            return self.announced
        pause = min(max(POLL_S, (now - self._changed) / PATIENCE), LONGEST_POLL_S)
        self._next = now + pause
        stamp = latest_stamp(self._weights)
        if stamp == self._stamp:
            return self.announced
        try:
            found = latest(self._weights)
        except RecordError:
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since > TROUBLE_S:
                raise
            return self.announced
        self._trouble_since = None
        self._stamp, self._changed, self._next = stamp, now, now + POLL_S
        if found is not None and found.attempt == self._attempt:
            self.announced = found
        return self.announced

    @property
    def done(self) -> bool:
        return self.announced is not None and self.announced.done

    @property
    def consumed(self) -> DrawSet:
        """Draws that the trainer has trained or filtered."""
        ranges = self.announced.consumed if self.announced else []
        if ranges is not self._consumed[0]:
            self._consumed = (ranges, DrawSet.from_ranges(ranges))
        return self._consumed[1]


class EnginesFile:
    """The addresses of one node's engines, from the node process to its worker processes."""

    def __init__(self, attempt_dir: Path, node: int) -> None:
        self.path = attempt_dir / f"engines-{node}.json"
        self._seen = (-1, -1)
        self._urls: list[str] = []
        self._weights = ""

    def publish(self, urls: Sequence[str], weights: str) -> None:
        """Tell who serves `weights`, as the supervisor names them."""
        publish_json(self.path, {"weights": weights, "urls": list(urls)})

    def weights(self) -> str:
        """Return the name of the weights that the engines last read by `urls` have proved."""
        return self._weights

    def urls(self) -> list[str]:
        """Return the engines that have proved the current version; none before the first."""
        try:
            stat = os.stat(self.path)
            if (stat.st_ino, stat.st_mtime_ns) != self._seen:
                told = json.loads(self.path.read_bytes())
                self._urls = [str(url) for url in told["urls"]]
                self._weights = str(told["weights"])
                self._seen = (stat.st_ino, stat.st_mtime_ns)
        except FileNotFoundError:
            return []
        return self._urls
