"""What the agent changed, as a patch, before anything restores the tests."""

from __future__ import annotations

import shlex
from functools import lru_cache
from pathlib import Path

from agentrl.sandbox.base import Sandbox
from agentrl.tasks.task import Task

MAX_BYTES = 256 * 1024
TIMEOUT_S = 10.0


async def take_patch(task: Task, sandbox: Sandbox, image: Path) -> str:
    """Return `git diff` against the commit that the image came with, new files included.

    Test files are left out. Empty when it is over 256 KiB (a cut patch applies nowhere), or git
    fails in the sandbox, which the agent may have brought about. Raises SandboxLost.
    """
    found = await sandbox.exec(
        _command(task, _base_commit(image / "testbed" / ".git")),
        timeout_s=TIMEOUT_S,
        max_bytes=MAX_BYTES,
    )
    return "" if found.exit_code or found.truncated else found.output


def _command(task: Task, base: str) -> str:
    git = "git -c safe.directory='*' -c core.quotepath=off -c core.hooksPath=/dev/null"
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
