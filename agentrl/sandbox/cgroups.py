"""Control groups that Apptainer's killed monitors left: empty, and each named by a dead process."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PATTERNS = ("apptainer/[0-9]*", "*/apptainer/[0-9]*")
"""Of version 2, and of version 1, which has a tree a controller."""


def remove_dead(root: Path = ROOT) -> int:
    """Remove those whose process is gone; return how many. One in use cannot be removed."""
    removed = 0
    for folder in [path for pattern in PATTERNS for path in root.glob(pattern)]:
        if not Path("/proc", folder.name).exists():
            try:
                folder.rmdir()
                removed += 1
            except OSError:  # in use, or another user's
                continue
    return removed
