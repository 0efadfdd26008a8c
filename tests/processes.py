"""Other processes as tests look at them: any may end, or be a zombie, between two looks."""

from __future__ import annotations

import psutil


def is_gone(process: psutil.Process | int) -> bool:
    """It, or who has this pid, has ended, be it that nobody has asked for its code yet."""
    try:
        one = psutil.Process(process) if isinstance(process, int) else process
        return bool(one.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def words(process: psutil.Process) -> list[str]:
    """Return what it was started with; nothing of one that has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one, too
        return []


def children(
    of: int | None = None, *, having: str = "", is_deep: bool = False
) -> list[psutil.Process]:
    """Return the living children of a process, by default of this one.

    having: part of a word that they were started with. is_deep: and the children of those.
    """
    try:
        found = psutil.Process(of).children(recursive=is_deep)
    except psutil.NoSuchProcess:
        return []
    return [one for one in found if any(having in word for word in words(one))]
