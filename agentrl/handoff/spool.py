"""The spool: finished groups on the shared filesystem, one file a draw, found by listing."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agentrl.errors import RecordError
from agentrl.handoff.parquet import decode_group, encode_group
from agentrl.handoff.publish import fsync_folder, publish_pieces
from agentrl.handoff.trajectory import Group

FILE_NAME = re.compile(r"(\d{8,})\.parquet")


class SpoolWriter:
    """Writes the groups of one inference node to spool/NODE/00000042.parquet."""

    def __init__(self, folder: Path, node: int) -> None:
        self.folder = folder / str(node)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, group: Group) -> Path:
        """Publish `group` whole or not at all; return its path. Raises OSError (a full disk, …)."""
        path = self.folder / f"{group.draw:08d}.parquet"
        publish_pieces(path, encode_group(group))
        return path


def list_spool(spool: Path) -> dict[int, Path]:
    """Return the file of each waiting draw, all nodes, in the order of draws."""
    return dict(sorted(list_files(spool)))


def list_files(spool: Path) -> list[tuple[int, Path]]:
    """Return (draw, file) for every spool file; one draw may be there from two nodes."""
    found = []
    for node in _folders(spool):
        with os.scandir(node) as entries:
            names = [entry.name for entry in entries]
        matches = [(FILE_NAME.fullmatch(name), name) for name in names]
        found += [(int(match[1]), node / name) for match, name in matches if match]
    return found


def read_group(path: Path) -> Group:
    """Read and verify one file. Raises RecordError: torn, changed, foreign, misnamed."""
    group = decode_group(path.read_bytes(), path)
    match = FILE_NAME.fullmatch(path.name)
    if match and int(match[1]) != group.draw:
        raise RecordError(f"{path}: named for draw {int(match[1])}, holds draw {group.draw}")
    return group


def delete(path: Path) -> None:
    """Remove a file that a verified checkpoint covers; one that is gone already is no error."""
    path.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _folders(spool: Path) -> list[Path]:
    try:
        with os.scandir(spool) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []  # no node has written yet
