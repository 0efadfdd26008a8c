"""Whether a report that is there is still that of its runs: nothing it was made of has changed.

A mark beside the page holds a digest of this code, of what was asked for, and of the name, size and
time of change of every file that a report reads. Looking costs no import of a plotting library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from agentrl.handoff.publish import publish_bytes

READ = (
    "config.yaml", "provenance.json", "ledger.jsonl", "events/*.jsonl",
    "evaluations/*/summary.json", "sft/*.sft.json", "attempts/*/exit/*.json",
)  # fmt: skip
"""What is read of a run directory of ours."""
WRITTEN = ("index.html", "summary.json")


@cache
def code() -> bytes:
    """Return a digest of the analysis code: what other code made is made anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.read_bytes())
    return digest.digest()


def key(folders: Sequence[Path], asked: Sequence[str]) -> str:
    """Return the digest of what a report would be made of."""
    digest = hashlib.sha256(code())
    digest.update("\0".join(asked).encode())
    for folder in folders:
        digest.update(f"\n{folder.resolve()}\n".encode())
        for path in _files(folder):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def is_fresh(folders: Sequence[Path], asked: Sequence[str]) -> bool:
    """Tell whether the first folder's report is of these very files."""
    report = folders[0] / "report"
    mark = _mark(folders[0])
    return (
        mark.is_file()
        and all((report / name).is_file() for name in WRITTEN)
        and mark.read_text() == key(folders, asked)
    )


def set_mark(folders: Sequence[Path], asked: Sequence[str], found: str) -> None:
    """Say that the report is of `found`, the key from before anything was read."""
    if found == key(folders, asked):  # else a run went on meanwhile: the next report is a new one
        publish_bytes(_mark(folders[0]), found.encode())


def _mark(folder: Path) -> Path:
    return folder / "report" / "cache" / "page"


def _files(folder: Path) -> Iterator[Path]:
    found = [path for pattern in READ for path in sorted(folder.glob(pattern))]
    ours = [path for path in found if path.is_file()]
    if ours:
        yield from ours
    else:  # other stacks' logs: anything may be read
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.relative_to(folder).parts[0] != "report":
                yield path
