"""What a build that was killed has left on disk: told by its host and process, so that the next
one can remove it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path


def stamp() -> str:
    """Return the name of this process among all that may write to one disk."""
    return f"{platform.node()}-{os.getpid()}"


def is_of_the_dead(name: str) -> bool:
    """Whether a `stamp` is of a process of this host that runs no more."""
    host, _, pid = name.rpartition("-")
    return host == platform.node() and pid.isdigit() and not Path("/proc", pid).exists()


def remove(path: Path) -> bool:
    """Remove a file, or a folder whose files may be of subordinate ids; return if it is gone."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and shutil.which("unshare"):
        words = ["unshare", "--map-auto", "--map-root-user", "rm", "-rf", "--", str(path)]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return not path.exists()


def clear(folder: Path, *, before: str = "", after: str = "") -> list[Path]:
    """Remove what is named before + stamp + after by processes that run no more.

    Returns what could not be removed.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    dead = [
        folder / name
        for name in names
        if name.startswith(before)
        and name.endswith(after)
        and is_of_the_dead(name.removeprefix(before).removesuffix(after))
    ]
    return [path for path in dead if not remove(path)]
