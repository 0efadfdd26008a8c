"""Which trajectory each span belongs to, for millions of them at once.

A span carries its trajectory's id. An id comes again when a launch attempt is killed and its draw
issued anew, so time decides too: a span belongs to the first trajectory of its id that ended no
earlier, if that one had begun. A span without one is of an attempt that nobody saw end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl import events
from agentrl.events import Event
from analysis.columns import numbers, texts
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.store import Store

SLACK_S = 1.0
"""A span may begin this long before its trajectory says it did, seconds."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The spans of one kind: whose they are, and when."""

    table: pa.Table
    owner: Ints
    """Row of the trajectory in its table; −1 if none was seen to end."""
    start: Floats
    end: Floats

    @property
    def seconds(self) -> Floats:
        return self.end - self.start

    @property
    def orphans(self) -> int:
        """Spans whose trajectory was not seen to end."""
        return int(np.sum(self.owner < 0))

    def numbers(self, name: str) -> Floats:
        return numbers(self.table, name)


@remembered
def owners_of(run: Run) -> Owners:
    """Return who owns the spans of a run."""
    return Owners(run.store)


class Owners:
    """Looks up the trajectory of spans; made once for a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[type[Event], Spans] = {}
        table = store.table(events.TrajectoryEvent)
        self.count = len(table)
        self.start, self.end = numbers(table, "start"), numbers(table, "end")
        self._zero = float(self.start.min()) if self.count else 0.0
        self._range = float(self.end.max() - self._zero) + 10.0 if self.count else 1.0
        codes, names = texts(table, "trajectory")
        self._codes = {name: code for code, name in enumerate(names)}
        self._codes_in_order = codes
        keys = self._key(codes, self.end)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def spans(self, kind: type[Event]) -> Spans:
        """Return the spans of a kind that carries a trajectory's id."""
        if kind not in self._found:
            self._found[kind] = self._spans(kind)
        return self._found[kind]

    def _spans(self, kind: type[Event]) -> Spans:
        table = self._store.table(kind)
        start, end = numbers(table, "start"), numbers(table, "end")
        return Spans(table=table, owner=self._owner(table, start, end), start=start, end=end)

    def sums(self, spans: Spans, amounts: Floats) -> Floats:
        """Add up `amounts` [spans] by trajectory."""
        known = spans.owner >= 0
        return np.asarray(
            np.bincount(spans.owner[known], amounts[known], minlength=self.count), np.float64
        )

    def _owner(self, table: pa.Table, start: Floats, end: Floats) -> Ints:
        if not self.count or not len(table):
            return np.full(len(table), -1, np.int64)
        local, names = texts(table, "trajectory")
        codes = np.array([self._codes.get(name, -1) for name in names], np.int64)[local]
        place = np.searchsorted(self._keys, self._key(codes, end - 1e-3))
        inside = np.minimum(place, self.count - 1)
        found = self._order[inside]
        fits = (place < self.count) & (codes >= 0) & (self._codes_in_order[found] == codes)
        fits &= start >= self.start[found] - SLACK_S
        return np.where(fits, found, -1)

    def _key(self, codes: Ints, at: Floats) -> Floats:
        return np.asarray(
            codes * self._range + np.clip(at - self._zero, 0.0, self._range - 1.0), np.float64
        )
