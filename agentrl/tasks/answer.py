"""An agent's answer: its changes of the repository, taken from its sandbox, laid into a fresh one.

Tests run there, so that nothing else it left decides: no program, package or setting of the system,
no process, no git hook, no file that git ignores, as those of an environment in the repository.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import lru_cache
from pathlib import Path

from agentrl.errors import GradingError, SandboxStartError
from agentrl.sandbox.base import ExecResult, Repeatable, Sandbox
from agentrl.tasks.patches import git
from agentrl.tasks.restore import TMP
from agentrl.tasks.task import Task

log = logging.getLogger(__name__)
MAX_BYTES = 16 << 20
"""An answer over that has failed."""
TIMEOUT_S = 60.0
NOT_FOUND = 127
_TAKE = """\
d={folder} && mkdir -p "$d/objects" || exit
cp -p .git/index "$d/index" 2>/dev/null
export GIT_DIR="$PWD/.git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$d/index" \
GIT_OBJECT_DIRECTORY="$d/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$PWD/.git/objects" \
GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
g="git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=off"
$g add -A . && $g diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames \
--src-prefix=a/ --dst-prefix=b/ {base} -- . ':(exclude,glob)**/site-packages/**' > "$d/patch"
"""
"""By an index and objects of its own: the agent's may be locked, closed to writing or cut short.

The copy keeps the index's time, by which git knows which files may have changed since within the
same second and must be read. Without it a change that keeps a file's size could be lost.
"""


class NoAnswer(Exception):
    """Nothing can be taken or laid, which is the policy's doing."""


async def carry(task: Task, sandbox: Repeatable, image: Path) -> Sandbox:
    """Close the agent's sandbox; return a fresh one with its answer laid, for the caller to close.

    image: the task's untouched folder, whose commit the answer is told against. Raises NoAnswer,
    GradingError, SandboxStartError, SandboxLost.
    """
    base = await asyncio.to_thread(base_commit, image)
    try:
        patch = await take(sandbox, base)
    finally:
        await sandbox.close()  # first: there are never more sandboxes than trajectories
    fresh = await _start(sandbox)
    try:
        if patch is None:
            await _refuse_without_git(task, fresh)
        elif patch and (done := await apply_patch(patch, fresh, timeout_s=TIMEOUT_S)).exit_code:
            raise NoAnswer(f"the changes do not apply to a fresh tree: {_last(done)}")
    except BaseException:
        await fresh.close()
        raise
    return fresh


async def take(sandbox: Sandbox, base: str) -> bytes | None:
    """Return what differs from `base`, new files included; None where no git was found.

    Raises NoAnswer, SandboxLost.
    """
    name = f"answer-{secrets.token_hex(8)}"
    done = await sandbox.exec(_TAKE.format(folder=f"{TMP}/{name}", base=base), timeout_s=TIMEOUT_S)
    if done.exit_code == NOT_FOUND:
        return None
    if done.exit_code:
        raise NoAnswer(f"git cannot tell what was changed: {_last(done)}")
    try:
        patch = await sandbox.get(f"/tmp/{name}/patch", max_bytes=MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NoAnswer(f"what was changed is gone again: {error}") from error
    if len(patch) > MAX_BYTES:
        raise NoAnswer(f"what was changed is over {MAX_BYTES >> 20} MiB")
    return patch


@lru_cache(maxsize=4096)
def base_commit(image: Path) -> str:
    """Return the commit that an image's repository stands at. Raises GradingError without one."""
    found = git("rev-parse", "--verify", "HEAD", cwd=image / "testbed")
    if found.returncode:
        raise GradingError(
            f"{image / 'testbed'} is not a git repository with a commit: "
            f"{found.stderr.decode().strip()[-200:]}; make it with `agentrl validate`, or commit it"
        )
    return found.stdout.decode().strip()


async def apply_patch(
    patch: bytes, sandbox: Sandbox, *, timeout_s: float, reverse: bool = False
) -> ExecResult:
    """Apply a patch in the sandbox's repository; a file, for no argument holds a long one."""
    await sandbox.put("/tmp/given.patch", patch)
    way = "--reverse " if reverse else ""
    return await sandbox.exec(
        f"git apply --whitespace=nowarn {way}{TMP}/given.patch", timeout_s=timeout_s
    )


async def _start(sandbox: Repeatable) -> Sandbox:
    """Start one like it, twice if need be: the attempt behind it has cost minutes."""
    try:
        return await sandbox.again()
    except SandboxStartError as error:
        log.warning("a sandbox for tests did not start, and is asked for once more: %s", error)
        return await sandbox.again()


async def _refuse_without_git(task: Task, fresh: Sandbox) -> None:
    found = await fresh.exec("git --version", timeout_s=TIMEOUT_S)
    if found.exit_code:
        raise GradingError(
            f"task {task.instance_id}: its environment has no git, by which changes are taken from "
            f"the agent's sandbox: {_last(found)}; add git to it"
        )
    raise NoAnswer("git is gone from the agent's sandbox")


def _last(done: ExecResult) -> str:
    return "it ran out of time" if done.timed_out else done.output.strip()[-300:]
