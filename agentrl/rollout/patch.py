"""What the agent changed, as a patch, before anything restores the tests."""

from __future__ import annotations

import shlex
from functools import lru_cache
from pathlib import Path

from agentrl.sandbox.base import Sandbox
from agentrl.tasks.task import Task

MAX_BYTES = 256 * 1024
TIMEOUT_S = 10.0
UNDECODED = "\ufffd"
"""What stands in a command's output for bytes that are not UTF-8."""
AS_BINARY = """\
d=$(mktemp -d) && git init -q --bare "$d" && mkdir -p "$d/info" && cp -p .git/index "$d" || exit
cp .git/info/exclude "$d/info" 2>/dev/null; echo '* -diff' > "$d/info/attributes"
export GIT_DIR="$d" GIT_WORK_TREE="$PWD" GIT_ALTERNATE_OBJECT_DIRECTORIES="$PWD/.git/objects"
"""
"""By attributes above the repository's own each file is a binary one, in a git of its own: grading
goes by the agent's after this. The index keeps its time: see tasks.answer."""


async def take_patch(task: Task, sandbox: Sandbox, image: Path) -> str:
    """Return `git diff` against the commit that the image came with, new files included.

    It applies as it is: what is not UTF-8 comes in git's binary form. Test files are left out.
    Empty when it is over 256 KiB (a cut patch applies nowhere), or git fails in the sandbox, which
    the agent may have brought about. Raises SandboxLost.
    """
    base = _base_commit(image / "testbed" / ".git")
    for before, quotes in (("", "off"), (AS_BINARY, "on")):
        command = before + _command(task, base, quotes)
        found = await sandbox.exec(command, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES)
        if found.exit_code or found.truncated:
            return ""
        if UNDECODED not in found.output:
            return found.output
    return ""


def _command(task: Task, base: str, quotes: str) -> str:
    git = f"git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.quotepath={quotes}"
    left_out = " ".join(shlex.quote(f":(exclude){path}") for path in task.test_files)
    return (
        f"{git} add -A -N . 2>/dev/null; "
        f"{git} diff --no-color --no-ext-diff --no-textconv --binary {base} -- . {left_out}"
    )


@lru_cache(maxsize=4096)
def _base_commit(git: Path) -> str:
    """Return the commit of HEAD, read without git; `HEAD` where the image has no such file."""
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return "HEAD"
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "HEAD")
