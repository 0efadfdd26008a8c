"""All event files of a run, read by a process a core.

A helper, `python -m analysis.parallel FOLDER PIPE`, takes pieces from the pipe and leaves Arrow
files in FOLDER.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pyarrow as pa

from analysis import work_pipe
from analysis.reader import Found, Reading, Share

ALONE = 48 << 20
"""Bytes up to which one process is quicker than several."""
PIECE = 16 << 20
"""Bytes of a piece."""
MOST_PROCESSES = 4
Piece = list[Share]
Tables = dict[str, pa.Table]


def read_all(shares: Sequence[Share], *, alone: int = ALONE) -> tuple[Tables, Found]:
    """Return what the files hold: `shares` are whole files. Raises RecordError, OSError.

    alone: bytes up to which this process reads them without a helper.
    """
    with _without_gc():
        return _read(cut(shares), is_alone=sum(share.end for share in shares) <= alone)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Look for no cycles meanwhile: events have none, and there are many of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(pieces: Sequence[Piece], *, is_alone: bool) -> tuple[Tables, Found]:
    processes = min(MOST_PROCESSES, work_pipe.cores())
    reading = Reading()
    if is_alone or processes == 1:
        for piece in pieces:
            reading.add(piece)
        return reading.tables(), reading.found()
    with TemporaryDirectory(prefix="agentrl-report-") as scratch:
        folders = [Path(scratch) / str(i) for i in range(processes - 1)]
        for folder in folders:
            folder.mkdir()
            (folder / "pieces.json").write_bytes(msgspec.json.encode(pieces))
        with work_pipe.shared("analysis.parallel", folders, len(pieces)) as taken:
            for number in taken:
                reading.add(pieces[number])
        others = [_left(folder) for folder in folders]
    return joined([(reading.tables(), reading.found()), *others])


def cut(shares: Sequence[Share]) -> list[Piece]:
    """Cut whole files into pieces of about equal size; a piece of small files holds several."""
    size = max(PIECE, sum(share.end for share in shares) // (work_pipe.MOST - 1) + 1)
    pieces: list[Piece] = [[]]
    room = size
    for share in shares:
        begin = share.start
        while begin < share.end:
            end = min(share.end, begin + room)
            pieces[-1].append(Share(file=share.file, path=share.path, start=begin, end=end))
            room -= end - begin
            begin = end
            if not room:
                pieces.append([])
                room = size
    return [piece for piece in pieces if piece]


def _left(folder: Path) -> tuple[Tables, Found]:
    """Return what a helper left; the files may go, for they are mapped."""
    tables = {}
    for path in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            tables[path.stem] = pa.ipc.open_file(source).read_all()
    return tables, msgspec.json.decode((folder / "found.json").read_bytes(), type=Found)


def joined(parts: Sequence[tuple[Tables, Found]]) -> tuple[Tables, Found]:
    """Return what several readers found as what one would have."""
    kinds = dict.fromkeys(kind for tables, _ in parts for kind in tables)
    joined = {
        kind: pa.concat_tables([tables[kind] for tables, _ in parts if kind in tables])
        for kind in kinds
    }
    found = [each for _, each in parts]
    return joined, Found(
        lines=sum(each.lines for each in found),
        rejected=_sum([each.rejected for each in found]),
        mended=_sum([each.mended for each in found]),
        unknown_fields=_sum([each.unknown_fields for each in found]),
    )


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def main(argv: Sequence[str]) -> int:
    """Take pieces from the pipe argv[1] and leave their tables in the folder argv[0]."""
    folder, pipe = Path(argv[0]), int(argv[1])
    pieces = msgspec.json.decode((folder / "pieces.json").read_bytes(), type=list[Piece])
    reading = Reading()
    with _without_gc():
        for number in work_pipe.taken(pipe):
            reading.add(pieces[number])
    for kind, table in reading.tables().items():
        sink = pa.OSFile(str(folder / f"{kind}.arrow"), "wb")
        with sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "found.json").write_bytes(msgspec.json.encode(reading.found()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
