"""Two faults of event files that bias every figure, found and undone: rows twice, clocks apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import numpy as np
import pyarrow as pa

from agentrl import events
from analysis.columns import FILE, numbers, tag, to_events

LEAST_SKEW_S = 0.5
"""Clocks closer than this are left alone, seconds."""
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
    rows = table.take(suspects).to_pylist()
    seen: set[tuple[object, ...]] = set()
    repeats = []
    for place, row in zip(suspects, rows, strict=True):
        origin = origins[row.pop(FILE)]
        key = (origin, *row.values())
        if key in seen:
            repeats.append(place)
        seen.add(key)
    keep = np.ones(len(order), bool)
    keep[repeats] = False
    return table.filter(pa.array(keep)), len(repeats)


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
    file = table.column(FILE).to_numpy()
    by = np.zeros(len(file))
    for number, seconds in shifts.items():
        by[file == number] = seconds
    for name in ("start", "end"):
        times = numbers(table, name)
        times = np.where(times > 0, times - by, times)  # 0 is a time that was not given
        table = table.set_column(table.column_names.index(name), name, pa.array(times))
    return table


def by_end(table: pa.Table) -> pa.Table:
    """Return `table` in the order in which its events ended."""
    start, end = numbers(table, "start"), numbers(table, "end")
    at = np.where(end > 0, end, start)
    if np.all(at[1:] >= at[:-1]):
        return table
    return table.take(pa.array(np.argsort(at, kind="stable")))


def mended(
    tables: Mapping[str, pa.Table], files: Sequence[tuple[str, str]]
) -> tuple[dict[str, pa.Table], dict[str, int], list[Skew]]:
    """Return tables without repeats, on one clock and in order; what was repeated; the skews.

    files: role and node of each file.
    """
    nodes = [node for _, node in files]
    numbered = {origin: number for number, origin in enumerate(dict.fromkeys(files))}
    origins = [numbered[origin] for origin in files]
    repeats: dict[str, int] = {}
    whole: dict[str, pa.Table] = {}
    for kind, table in tables.items():
        whole[kind], many = without_repeats(table, origins)
        if many:
            repeats[kind] = many
    found = skews(whole.get(tag(events.VersionEvent)), nodes)
    by_node = {skew.node: skew.seconds for skew in found}
    shifts = {i: by_node[node] for i, node in enumerate(nodes) if node in by_node}
    return {kind: by_end(moved(each, shifts)) for kind, each in whole.items()}, repeats, found
