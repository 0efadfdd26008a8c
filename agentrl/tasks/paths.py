"""Paths on this host that rows, patches and images name: never outside of their folder."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import TaskError


def within(folder: Path, name: str | Path) -> Path:
    """Return folder/name. Raises TaskError where that, its links followed, is outside of it."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"{path} leads out of {folder}, to {path.resolve()}: refused")
    return path
