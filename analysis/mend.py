"""Faults of event files that bias every figure, found and undone: rows twice, clocks apart.

Engines are named by their nodes here too, so that those of two nodes are never taken for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl import events
from analysis.columns import FILE, numbers, tag, texts, to_arrow, to_events, to_texts, whole_numbers

DAY_S = 86400.0
FAR_S = 400 * DAY_S
"""No run is that long, seconds."""
LEAST_SKEW_S = 0.5
"""Clocks closer than this are left alone, seconds."""
OF_ENGINES: tuple[type[events.Event], ...] = (
    events.EngineState,
    events.EngineFault,
    events.EngineMetrics,
    events.VersionEvent,
)
"""Kinds whose `engine` is a name that a node gave."""
LEAST_VERSIONS = 3
"""Versions that a node must have proved before its clock is called ahead."""


class Skew(msgspec.Struct, frozen=True):
    """How far a node's clock is from the trainer's."""

    node: str
    seconds: float
    """Above zero: ahead. Its events were moved by minus this."""
    versions: int
    """Weight versions that the estimate rests on."""

    @property
    def words(self) -> str:
        way = "ahead of" if self.seconds > 0 else "behind"
        return (
            f"node {self.node}'s clock is {abs(self.seconds):.1f} s {way} the trainer's by "
            f"{self.versions} weight versions; its events were moved."
        )


def without_repeats(table: pa.Table, origins: Sequence[int]) -> tuple[pa.Table, int]:
    """Return `table` without rows that one origin wrote twice, and how many went.

    origins: a number for each file; files of one role on one node have the same.
    """
    start, end = numbers(table, "start"), numbers(table, "end")
    order = np.lexsort((start, end))
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(start[order]) == 0) & (np.diff(end[order]) == 0)
    if not same.any():
        return table, 0
    suspects = np.sort(order[same | np.append(same[1:], False)])
    firsts = _firsts(table.take(to_arrow(suspects)), origins)
    keep = np.ones(len(order), bool)
    keep[suspects] = False
    keep[suspects[firsts]] = True
    return table.filter(to_arrow(keep)), len(suspects) - len(firsts)


def _firsts(rows: pa.Table, origins: Sequence[int]) -> NDArray[np.int64]:
    """Return the first row of each sort; two are of one sort if of one origin and equal in all."""
    sort = np.array(origins)[whole_numbers(rows, FILE)]
    for field in rows.schema:
        if field.name != FILE:
            is_text = field.type == pa.string()
            value = texts(rows, field.name)[0] if is_text else numbers(rows, field.name)
            _, code = np.unique(value, return_inverse=True)
            _, sort = np.unique(sort * (code.max() + 1) + code, return_inverse=True)
    return np.unique(sort, return_index=True)[1]


def skews(versions: pa.Table | None, nodes: Sequence[str]) -> list[Skew]:
    """Estimate clock skew from when versions were published and proved.

    versions: the table of VersionEvent; nodes: the node of each file number. With p(v) the start of
    v's publication and q(n, v) the first proof of v on node n, a(n) = min over v of q − p is at
    least 0 with right clocks, and about alike on all nodes. r = max(0, median over nodes of a(n));
    the skew of n is a(n) − r.
    """
    if versions is None:
        return []
    published: dict[int, float] = {}
    proved: dict[str, dict[int, float]] = defaultdict(dict)
    homes = set()
    for event, file in zip(
        to_events(events.VersionEvent, versions), versions.column(FILE).to_pylist(), strict=True
    ):
        if event.phase == "published":
            published.setdefault(event.version, event.start)
            homes.add(nodes[file])
        elif event.phase == "proved":
            first = proved[nodes[file]].setdefault(event.version, event.end)
            proved[nodes[file]][event.version] = min(first, event.end)
    waits = {
        node: [at - published[v] for v, at in found.items() if v in published]
        for node, found in proved.items()
        if node not in homes
    }
    return _apart({node: found for node, found in waits.items() if found})


def _apart(waits: Mapping[str, Sequence[float]]) -> list[Skew]:
    if not waits:
        return []
    usual = max(0.0, median(min(found) for found in waits.values()))
    found = []
    for node, some in sorted(waits.items()):
        seconds = min(some) - usual
        is_sure = seconds < 0 or len(some) >= LEAST_VERSIONS
        if abs(seconds) >= LEAST_SKEW_S and is_sure:
            found.append(Skew(node=node, seconds=seconds, versions=len(some)))
    return found


def moved(table: pa.Table, shifts: Mapping[int, float]) -> pa.Table:
    """Return `table` with the times of each file in `shifts` made less by its seconds."""
    if not shifts:
        return table
    file = whole_numbers(table, FILE)
    by = np.zeros(len(file))
    for number, seconds in shifts.items():
        by[file == number] = seconds
    for name in ("start", "end"):
        times = numbers(table, name)
        times = np.where(times > 0, times - by, times)  # 0 is a time that was not given
        table = table.set_column(table.column_names.index(name), name, to_arrow(times))
    return table


def forward(table: pa.Table) -> tuple[pa.Table, int]:
    """Return `table` with spans that ended before they began begun at their end; their number.

    A clock that is set back within a span leaves one. How long it was nobody knows.
    """
    start, end = numbers(table, "start"), numbers(table, "end")
    is_backward = (end > 0) & (start > end)
    if not is_backward.any():
        return table, 0
    place = table.column_names.index("start")
    begun = to_arrow(np.where(is_backward, end, start))
    return table.set_column(place, "start", begun), int(is_backward.sum())


def engines_by_node(table: pa.Table, nodes: Sequence[str]) -> pa.Table:
    """Return `table` with each engine named by its node too: each node numbers its own from 0.

    nodes: the node of each file number.
    """
    codes, names = texts(table, "engine")
    pairs, place = np.unique(whole_numbers(table, FILE) * len(names) + codes, return_inverse=True)
    told = [
        events.engine_of(nodes[pair // len(names)], names[pair % len(names)])
        for pair in pairs.tolist()
    ]
    column = to_texts(told).take(to_arrow(place.astype(np.int64)))
    return table.set_column(table.column_names.index("engine"), "engine", column)


def by_end(table: pa.Table) -> pa.Table:
    """Return `table` in the order in which its events ended, those of one moment by file."""
    at, file = moments(table), whole_numbers(table, FILE)
    later = np.diff(at) > 0
    if np.all(later | ((np.diff(at) == 0) & (np.diff(file) >= 0))):
        return table
    return table.take(to_arrow(np.lexsort((file, at))))


def moments(table: pa.Table) -> NDArray[np.float64]:
    """Return when each event ended; for one without an end, when it began."""
    start, end = numbers(table, "start"), numbers(table, "end")
    return np.where(end > 0, end, start)


def without_far(tables: Mapping[str, pa.Table]) -> tuple[dict[str, pa.Table], int]:
    """Return the tables without events whose times are `FAR_S` from the median one's; their number.

    A node whose clock was not set yet writes times of 1970, and one of them would stretch every
    axis. A time of 0 is one that was not given.
    """
    all_moments = [moments(table) for table in tables.values()]
    known = np.concatenate([at[at > 0] for at in all_moments] or [np.zeros(0)])
    if not len(known):
        return dict(tables), 0
    middle = float(np.partition(known, len(known) // 2)[len(known) // 2])
    kept, many = {}, 0
    for kind, table in tables.items():
        near = np.ones(len(table), bool)
        for name in ("start", "end"):
            at = numbers(table, name)
            near &= (at == 0) | (np.abs(at - middle) <= FAR_S)
        many += int(np.sum(~near))
        kept[kind] = table if near.all() else table.filter(to_arrow(near))
    return kept, many


class Mends(msgspec.Struct):
    """What was found and undone."""

    repeats: dict[str, int] = {}
    """Rows that stood twice, by kind."""
    far: int = 0
    """Events left out because of their time."""
    skews: list[Skew] = []
    backward: int = 0
    """Spans that ended before they began."""

    @property
    def words(self) -> Iterator[str]:
        """Say it for the page, a sentence each."""
        if self.far:
            yield f"{self.far:,} events left out: over {FAR_S / DAY_S:.0f} days from the others."
        for kind, count in sorted(self.repeats.items()):
            yield f"{count:,} {kind} events stood twice and count once."
        for skew in self.skews:
            yield skew.words
        if self.backward:
            yield (
                f"{self.backward:,} spans end before they begin, for a clock was set back "
                "meanwhile; they count as no time."
            )


def mended(
    tables: Mapping[str, pa.Table], files: Sequence[tuple[str, str]]
) -> tuple[dict[str, pa.Table], Mends]:
    """Return tables without repeats, on one clock, in order and with engines told apart by node.

    Returns what was mended, too.

    files: role and node of each file.
    """
    nodes = [node for _, node in files]
    numbered = {origin: number for number, origin in enumerate(dict.fromkeys(files))}
    origins = [numbered[origin] for origin in files]
    whole = dict(tables)
    repeats: dict[str, int] = {}
    backward = 0
    for kind, table in whole.items():
        whole[kind], many = without_repeats(table, origins)
        if many:
            repeats[kind] = many
        whole[kind], many = forward(whole[kind])
        backward += many
    found = skews(whole.get(tag(events.VersionEvent)), nodes)
    by_node = {skew.node: skew.seconds for skew in found}
    shifts = {i: by_node[node] for i, node in enumerate(nodes) if node in by_node}
    for kind in map(tag, OF_ENGINES):
        if kind in whole:
            whole[kind] = engines_by_node(whole[kind], nodes)
    ordered = {kind: by_end(moved(each, shifts)) for kind, each in whole.items()}
    return ordered, Mends(repeats=repeats, skews=found, backward=backward)
