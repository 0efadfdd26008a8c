"""The command that is one try at a repair: restore, edit, test, hand in when the tests pass."""

from __future__ import annotations

OPEN = "git checkout -q f.py && sed -i '"
CLOSE = "' f.py && python -S check.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def try_command(line: int, pattern: str, new: str) -> str:
    """Return the command that replaces the first `pattern` on `line` and hands in if that mends.

    pattern: a basic regular expression without `|`. new: text without `|`, `&` or a backslash.
    """
    return f"{OPEN}{line}s|{pattern}|{new}|{CLOSE}"
