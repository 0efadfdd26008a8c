"""Which engine a request goes to: the one that knows its trajectory, else the least loaded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence

REMEMBERED = 65_536
"""Trajectories whose engine is remembered, the newest."""


class Router:
    """Picks among `urls()`, which lists only engines that proved the current version."""

    def __init__(self, urls: Callable[[], Sequence[str]], *, remembered: int = REMEMBERED) -> None:
        self._urls = urls
        self._remembered = remembered
        self._home: OrderedDict[str, str] = OrderedDict()
        self._assigned: Counter[str] = Counter()
        """Remembered trajectories by engine."""
        self._running: Counter[str] = Counter()

    def pick(self, trajectory: str, *, avoid: Collection[str] = ()) -> str | None:
        """Return an engine's address, or None while there is none.

        A trajectory stays with its engine as long as that is listed and not to be avoided.
        Addresses in `avoid` are taken only when nothing else is listed.
        """
        listed = self._urls()
        home = self._home.get(trajectory)
        if home in listed and home not in avoid:
            self._home.move_to_end(trajectory)
            return home
        rest = [url for url in listed if url not in avoid] or list(listed)
        if not rest:
            return None
        url = min(rest, key=lambda one: (self._running[one], self._assigned[one]))
        self._settle(trajectory, url)
        return url

    def begin(self, url: str) -> None:
        self._running[url] += 1

    def end(self, url: str) -> None:
        self._running[url] -= 1

    def _settle(self, trajectory: str, url: str) -> None:
        if (old := self._home.pop(trajectory, None)) is not None:
            self._assigned[old] -= 1
        self._home[trajectory] = url
        self._assigned[url] += 1
        if len(self._home) > self._remembered:
            _, gone = self._home.popitem(last=False)
            self._assigned[gone] -= 1
