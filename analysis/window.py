"""A stretch of a run's time, as a person gives it with --since and --until."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from math import inf

from agentrl.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AFTER = re.compile(r"(\d+(?:\.\d+)?)([smhd])$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Each end is a time such as `2026-11-30T01:00`, or `90m`: that long after the run's begin."""

    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        self.bounds(0.0)

    @property
    def words(self) -> str:
        return f"{self.since or 'the begin'} to {self.until or 'the end'}"

    def bounds(self, begin: float) -> tuple[float, float]:
        """Return both ends in seconds since the epoch. Raises ConfigError."""
        low = _at(self.since, begin) if self.since else -inf
        high = _at(self.until, begin) if self.until else inf
        return low, high


def _at(text: str, begin: float) -> float:
    after = _AFTER.match(text)
    if after:
        return begin + float(after[1]) * _UNITS[after[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"time {text!r}: {error}; give 2026-11-30T01:00, or 90m for that long after the begin"
        ) from error
