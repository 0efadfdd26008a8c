"""All events of a run as tables, read by a process a core, and a Parquet cache beside the report.

The cache (report/cache/KEY/*.parquet) is plain Parquet, a file a kind, rows in order of their end:
any other tool may read it. KEY is made of the files' names, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import RecordError
from agentrl.events import Event
from analysis.columns import FILE, numbers, schema, tag, to_events
from analysis.mend import Skew, mended
from analysis.reader import Found, Reading, Share, read_share

FORMAT = 1
"""Of the cache; another number when its content comes to mean something else."""
ALONE = 48 << 20
"""Bytes up to which one process is quicker than several."""
E = TypeVar("E", bound=Event)
_NAME = re.compile(r"(?P<role>[^-]+)-(?P<node>.+)-(?P<pid>\d+)\.jsonl$")


class EventFile(msgspec.Struct, frozen=True):
    """One file of events; role and node are from its name."""

    name: str
    size: int
    changed_ns: int
    role: str = ""
    node: str = ""


class Index(msgspec.Struct):
    """What is known of a set of tables beside their rows."""

    format: int
    files: list[EventFile]
    found: Found
    repeats: dict[str, int] = {}
    """Rows that stood twice, by kind."""
    skews: list[Skew] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Tables of events by kind, each ordered by end."""

    tables: dict[str, pa.Table]
    index: Index
    memo: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    """What was computed from the tables; see `memo`."""

    def __len__(self) -> int:
        return sum(len(table) for table in self.tables.values())

    def table(self, kind: type[Event]) -> pa.Table:
        """Return the table of one kind; an empty one if there is none."""
        return self.tables.get(tag(kind), schema(kind).empty_table())

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, ordered by end; the same list each time."""
        if kind not in self.memo:
            self.memo[kind] = to_events(kind, self.table(kind))
        return cast(list[E], self.memo[kind])

    def nodes(self, kind: type[Event]) -> list[str]:
        """Return the node that wrote each row of a kind."""
        names = [file.node for file in self.index.files]
        return [names[i] for i in self.table(kind).column(FILE).to_pylist()]

    def span(self) -> tuple[float, float]:
        """Return the first start and the last end of all events; (0, 0) without any."""
        lows = [_least(numbers(each, "start")) for each in self.tables.values()]
        highs = [float(np.max(numbers(each, "end"), initial=0.0)) for each in self.tables.values()]
        lows = [low for low in lows if low > 0]
        return (min(lows, default=0.0), max(highs, default=0.0))

    def within(self, since: float, until: float) -> Store:
        """Return the events that ended in [since, until]."""
        kept = {}
        for kind, table in self.tables.items():
            start, end = numbers(table, "start"), numbers(table, "end")
            at = np.where(end > 0, end, start)
            kept[kind] = table.filter(pa.array((at >= since) & (at <= until)))
        return Store(tables=kept, index=self.index)


def event_files(folder: Path) -> list[EventFile]:
    """List the event files of `folder`, by name."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        is_named = _NAME.match(path.name)
        role, node = (is_named["role"], is_named["node"]) if is_named else (path.stem, "")
        stat = path.stat()
        found.append(
            EventFile(
                name=path.name, size=stat.st_size, changed_ns=stat.st_mtime_ns, role=role, node=node
            )
        )
    return found


def open_store(folder: Path, files: Sequence[EventFile], cache: Path | None) -> Store:
    """Return the events of `files` in `folder`, from the cache if it is of these very files."""
    cached = _from_cache(cache, files) if cache else None
    if cached:
        return cached
    tables, found = _read(folder, files)
    whole, repeats, skews = mended(tables, [(file.role, file.node) for file in files])
    index = Index(format=FORMAT, files=list(files), found=found, repeats=repeats, skews=skews)
    store = Store(tables=whole, index=index)
    if cache:
        _to_cache(store, cache)
    return store


def from_events(found: Iterable[Event], *, node: str = "") -> Store:
    """Return a store of events that an adapter made."""
    reading = Reading()
    reading.put(list(found), 0)
    name = EventFile(name="adapter", size=0, changed_ns=0, node=node)
    tables, repeats, _ = mended(reading.tables(), [("", node)])
    return Store(
        tables=tables,
        index=Index(format=FORMAT, files=[name], found=reading.found(), repeats=repeats),
    )


def _least(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.min(times[times > 0], initial=np.inf)) if np.any(times > 0) else 0.0


def _read(folder: Path, files: Sequence[EventFile]) -> tuple[dict[str, pa.Table], Found]:
    processes = min(2, len(os.sched_getaffinity(0)))
    if sum(file.size for file in files) <= ALONE or processes == 1:
        reading = Reading()
        for share in _shares(folder, files, 1)[0]:
            reading.add(share)
        return reading.tables(), reading.found()
    parts: dict[str, list[pa.Table]] = {}
    with TemporaryDirectory(prefix="agentrl-report-") as scratch:
        folders = [Path(scratch) / str(i) for i in range(processes)]
        _run_readers(folders, _shares(folder, files, processes))
        found = [read_share(each, parts) for each in folders]
    return {kind: pa.concat_tables(some) for kind, some in parts.items()}, _sum(found)


def _run_readers(folders: Sequence[Path], shares: Sequence[list[Share]]) -> None:
    """Have one process read each share. Raises RecordError in the process's own words."""
    running = []
    for folder, share in zip(folders, shares, strict=True):
        process = subprocess.Popen(
            [sys.executable, "-m", "analysis.reader", str(folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append((process, share))
        if process.stdin:  # a share is smaller than a pipe, so this does not wait
            process.stdin.write(msgspec.json.encode(share))
            process.stdin.close()
            process.stdin = None
    for process, share in running:
        _, said = process.communicate()
        if process.returncode:
            names = ", ".join(sorted({Path(each.path).name for each in share}))
            raise RecordError(
                f"reading {names} exited {process.returncode}: {said.decode(errors='replace')}"
            )


def _shares(folder: Path, files: Sequence[EventFile], many: int) -> list[list[Share]]:
    """Cut all bytes of `files` into `many` equal runs."""
    whole = sum(file.size for file in files)
    cuts = [round(whole * i / many) for i in range(many + 1)]
    shares: list[list[Share]] = [[] for _ in range(many)]
    begin = 0
    for number, file in enumerate(files):
        for share, (low, high) in zip(shares, pairwise(cuts), strict=True):
            start, end = max(low, begin) - begin, min(high, begin + file.size) - begin
            if start < end:
                path = str(folder / file.name)
                share.append(Share(file=number, path=path, start=start, end=end))
        begin += file.size
    return shares


def _sum(found: Sequence[Found]) -> Found:
    counts: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for each in found:
        for total, part in zip(
            counts, (each.rejected, each.mended, each.unknown_fields), strict=True
        ):
            total.update(part)
    rejected, mended_lines, unknown = map(dict, counts)
    return Found(
        lines=sum(each.lines for each in found),
        rejected=rejected,
        mended=mended_lines,
        unknown_fields=unknown,
    )


def _from_cache(cache: Path, files: Sequence[EventFile]) -> Store | None:
    folder = cache / _key(files)
    try:
        index = msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)
        paths = sorted(folder.glob("*.parquet"))
        return Store(tables={path.stem: pq.read_table(path) for path in paths}, index=index)
    except (OSError, msgspec.DecodeError, pa.ArrowInvalid):
        return None  # none, or one that a crash cut short: the events are read again


def _to_cache(store: Store, cache: Path) -> None:
    """Write a folder and give it its name when it is whole; another report may read meanwhile."""
    cache.mkdir(parents=True, exist_ok=True)
    ours = cache / _key(store.index.files)
    for old in cache.iterdir():
        shutil.rmtree(old, ignore_errors=True)  # another report may remove it at this moment
    scratch = Path(mkdtemp(dir=cache, prefix=".new-"))
    for kind, table in store.tables.items():
        pq.write_table(table, scratch / f"{kind}.parquet", compression="zstd")
    (scratch / "index.json").write_bytes(msgspec.json.encode(store.index))
    if not ours.exists():
        scratch.rename(ours)


def _key(files: Sequence[EventFile]) -> str:
    return hashlib.sha256(msgspec.json.encode((FORMAT, files))).hexdigest()[:16]
