"""All events of a run as tables, and a Parquet cache of them beside the report.

The cache (report/cache/events/KEY/*.parquet) is plain Parquet, a file a kind, rows in order of
their end: any other tool may read it. KEY is made of the files' names, sizes and times of change,
and of the columns.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.events import Event, writer_of
from analysis.columns import FILE, KINDS, numbers, schema, tag, to_arrow, to_events
from analysis.mend import Mends, mended, moments, without_far
from analysis.parallel import read_all
from analysis.reader import Found, Reading, Share

FORMAT = 4
"""Of the cache; another number when its content comes to mean something else."""
ABANDONED_S = 3600.0
"""Age from which an unfinished cache is one that nobody writes any more, seconds."""
SCRATCH = ".new-"
E = TypeVar("E", bound=Event)


class EventFile(msgspec.Struct, frozen=True):
    """One file of events; role and node are from its name."""

    name: str
    size: int
    changed_ns: int
    role: str = ""
    node: str = ""


class Index(msgspec.Struct):
    """What is known of a set of tables beside their rows."""

    files: list[EventFile]
    found: Found
    mends: Mends


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Tables of events by kind, each ordered by end."""

    tables: dict[str, pa.Table]
    index: Index
    bounds: tuple[float, float] = (-inf, inf)
    """Events that ended in these are here, seconds since the epoch."""
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
            at = moments(table)
            kept[kind] = table.filter(to_arrow((at >= since) & (at <= until)))
        low, high = self.bounds
        return Store(tables=kept, index=self.index, bounds=(max(low, since), min(high, until)))


def event_files(folder: Path) -> list[EventFile]:
    """List the event files of `folder` that can be read, by name."""
    found = []
    for path in sorted(filter(is_readable, folder.glob("*.jsonl"))):
        role, node = writer_of(path.name)
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # it went after it was listed: as if it had gone before
        found.append(
            EventFile(
                name=path.name, size=stat.st_size, changed_ns=stat.st_mtime_ns, role=role, node=node
            )
        )
    return found


def is_readable(path: Path) -> bool:
    """Tell whether it is a file, or a link to one, that may be read."""
    return path.is_file() and os.access(path, os.R_OK)


def open_store(folder: Path, files: Sequence[EventFile], cache: Path | None) -> Store:
    """Return the events of `files` in `folder`, from the cache if it is of these very files."""
    cached = _from_cache(cache, files) if cache else None
    if cached:
        return cached
    store = whole(*read_all(shares(folder, files)), files)
    if cache:
        _to_cache(store, cache)
    return store


def whole(tables: Mapping[str, pa.Table], found: Found, files: Sequence[EventFile]) -> Store:
    """Return what was read of `files`, its faults mended."""
    near, far = without_far(tables)
    sound, mends = mended(near, [(file.role, file.node) for file in files])
    mends.far = far
    return Store(tables=sound, index=Index(files=list(files), found=found, mends=mends))


def shares(folder: Path, files: Sequence[EventFile]) -> list[Share]:
    """Return the whole of each file, numbered."""
    return [
        Share(file=number, path=str(folder / file.name), start=0, end=file.size)
        for number, file in enumerate(files)
    ]


def from_events(found: Iterable[Event], *, node: str = "") -> Store:
    """Return a store of events that an adapter made."""
    reading = Reading()
    reading.put(list(found), 0)
    name = EventFile(name="adapter", size=0, changed_ns=0, node=node)
    tables, mends = mended(reading.tables(), [("", node)])
    return Store(tables=tables, index=Index(files=[name], found=reading.found(), mends=mends))


def _least(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.min(times[times > 0], initial=np.inf)) if np.any(times > 0) else 0.0


def _from_cache(cache: Path, files: Sequence[EventFile]) -> Store | None:
    folder = cache / _key(files)
    try:
        index = msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)
        paths = sorted(folder.glob("*.parquet"))
        return Store(tables={path.stem: pq.read_table(path) for path in paths}, index=index)
    except (OSError, msgspec.DecodeError, pa.ArrowInvalid):
        return None  # none, or one that a crash cut short: the events are read again


def _to_cache(store: Store, cache: Path) -> None:
    """Write a folder and give it its name when it is whole; other reports may do so meanwhile."""
    cache.mkdir(parents=True, exist_ok=True)
    ours = cache / _key(store.index.files)
    for old in cache.iterdir():
        if not old.name.startswith(SCRATCH) or _is_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)  # another report may remove it at this moment
    scratch = Path(mkdtemp(dir=cache, prefix=SCRATCH))
    try:
        for kind, table in store.tables.items():
            pq.write_table(table, scratch / f"{kind}.parquet", compression="zstd")
        (scratch / "index.json").write_bytes(msgspec.json.encode(store.index))
        if not ours.exists():
            scratch.rename(ours)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_abandoned(scratch: Path) -> bool:
    try:
        return time.time() - scratch.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:
        return False  # it has become a cache just now


def _key(files: Sequence[EventFile]) -> str:
    columns = [str(schema(kind)) for kind in KINDS.values()]
    return hashlib.sha256(msgspec.json.encode((FORMAT, columns, files))).hexdigest()[:16]
