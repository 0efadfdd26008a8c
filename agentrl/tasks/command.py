"""The command that is one try at a repair: restore, edit, test, hand in when the tests pass."""

from __future__ import annotations

OPEN = "git checkout -q f.py && sed -i '"
CLOSE = "' f.py && python check.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SPECIAL = str.maketrans({char: f"\\{char}" for char in r"\*.[]^$"})


def try_command(line: int, old: str, new: str) -> str:
    """Return the command that replaces the first `old` on `line` and hands in if that mends it."""
    return f"{OPEN}{line}s|{old.translate(_SPECIAL)}|{new}|{CLOSE}"
