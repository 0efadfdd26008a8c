"""Patches on this host: the files that one touches, and what it makes of files of an image."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.errors import TaskError

_PATHS = re.compile(
    r"^(?:diff --git a/(?P<same>.+) b/(?P=same)"  # an empty file's or a binary one's only line
    r"|(?:(?:---|\+\+\+) [ab]/|rename (?:from|to) )(?P<one>.+?)(?:\t.*)?)$",
    re.MULTILINE,
)


def touched(patch: str) -> tuple[str, ...]:
    """Return the paths that a patch changes, makes, removes or renames, in order.

    Raises TaskError for one that leads out of the repository.
    """
    paths = dict.fromkeys(found["same"] or found["one"] for found in _PATHS.finditer(patch))
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            raise TaskError(f"a patch names {path}, outside of its repository: refused")
    return tuple(paths)


def applied(patch: str, files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return each touched path with its content under `patch`, None where it is gone.

    files: what the touched paths hold before, those that exist. Raises TaskError in git's words.
    """
    with tempfile.TemporaryDirectory(prefix="patch-") as name:
        folder = Path(name)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        # the ceiling: inside of another repository git would skip what lies outside of it
        done = git("apply", "--whitespace=nowarn", "-", cwd=folder, given=patch)
        if done.returncode:
            raise TaskError(f"a patch does not apply: {done.stderr.decode().strip()[-500:]}")
        return {
            path: (folder / path).read_bytes() if (folder / path).is_file() else None
            for path in touched(patch)
        }


def git(*words: str, cwd: Path, given: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run git in `cwd`, seeing no repository above it and no configuration of the user."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    argv = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(
        argv, cwd=cwd, input=given.encode(), capture_output=True, check=False, env=environment
    )


def from_texts(changes: Iterable[tuple[str, str, str]]) -> str:
    """Return the patch that turns (path, old text, new text) from old to new; empty is no file."""
    return "".join(_file_patch(*change) for change in changes)


def _file_patch(path: str, old: str, new: str) -> str:
    lines = list(
        difflib.unified_diff(
            _lines(old),
            _lines(new),
            f"a/{path}" if old else "/dev/null",
            f"b/{path}" if new else "/dev/null",
        )
    )
    mode = "" if old and new else f"{'new' if new else 'deleted'} file mode 100644\n"
    body = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return f"diff --git a/{path} b/{path}\n{mode}{body}" if lines else ""


def _lines(text: str) -> list[str]:
    """Split at newlines alone: `splitlines` knows separators that git does not."""
    return re.findall(r"[^\n]*\n|[^\n]+$", text)
