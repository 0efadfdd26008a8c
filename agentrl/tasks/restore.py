"""Undoes, before grading, what an agent did to the files that decide: tests and their settings.

Put back are the task's test files (its test patch applied), and each file that steers the runner:
conftest.py, pytest.ini and the like, modules that would shadow the runner's own. Such a file of the
agent's own making is removed, and so is what was compiled of them. What the task's fix itself
touches is left to the agent.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agentrl.errors import GradingError, SandboxLost, TaskError
from agentrl.sandbox.base import Sandbox
from agentrl.tasks.patches import applied, touched
from agentrl.tasks.paths import within
from agentrl.tasks.task import Task

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"),
    *("setup.cfg", "pyproject.toml"),
)
"""Files from which pytest, unittest or tox take what to run and how, in any folder."""
SHADOWING = frozenset(
    {
        *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py", "xdist"),
        *("sitecustomize", "usercustomize", "exceptiongroup", "tomli", "agentrl_report"),
        *sys.stdlib_module_names,
    }
)
"""Modules that the runner imports: at the root, which is on its path, another would be it."""
SKIPPED = (".git", "site-packages", "node_modules")
"""Folders that are not looked into: what steers tests lies beside them."""
TIMEOUT_S = 60.0
_LIST = (
    "find . \\( {skipped} \\) -prune -o \\( {names} \\) -print0 && echo && "
    "find . -maxdepth 1 -mindepth 1 -print0"
)
TMP = '"${TMPDIR:-/tmp}"'
"""What a command calls the sandbox's /tmp, whatever kind of sandbox it is."""
_LIST_BYTES = 1 << 20
_BATCH_BYTES = 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Restoration:
    """What is put back for one task over one image."""

    files: Mapping[str, bytes]
    gone: tuple[str, ...]
    """Test files that the test patch takes away."""
    settings: Mapping[str, bytes]
    """The image's own steering files."""
    root: frozenset[str]
    """Names at the image's root."""
    spared: frozenset[str]
    """Paths that the fix touches."""

    def is_planted(self, path: str) -> bool:
        """Whether a path steers or shadows the runner and is neither the image's nor the fix's."""
        if path in self.settings or path in self.files or path in self.spared:
            return False
        folder, _, name = path.rpartition("/")
        if name in STEERING:
            return True
        module = name.partition(".")[0] if name.endswith((".py", ".so")) else name
        is_new = not folder and name not in self.root
        return is_new and module in SHADOWING and not _is_below(path, self.spared)


def plan(task: Task, image: Path) -> Restoration:
    """Return what to put back for `task`. Raises GradingError when its image lacks a test file."""
    try:
        return _plan(
            str(image), task.instance_id, task.test_files, task.test_patch, task.gold or task.patch
        )
    except TaskError as error:
        raise GradingError(f"task {task.instance_id}: {error}") from error


async def put_back(sandbox: Sandbox, wanted: Restoration, hidden: Mapping[str, bytes]) -> str:
    """Restore the sandbox's files; return why its own file system refused, else ''.

    hidden: tests that are in place for grading only. Raises GradingError where the environment has
    no `find`, SandboxLost.
    """
    command = _LIST.format(names=_any_of(STEERING), skipped=_any_of(SKIPPED))
    found = await sandbox.exec(command, timeout_s=TIMEOUT_S, max_bytes=_LIST_BYTES)
    if found.exit_code == 127:  # the system is as the environment has it
        raise GradingError(f"cannot list the repository's files: {found.output[-300:].strip()}")
    if found.exit_code or found.truncated:
        return f"cannot list the repository's files: {found.output[-300:]}"
    paths = [part.strip("\n").removeprefix("./") for part in found.output.split("\0")]
    planted = [path for path in dict.fromkeys(paths) if path and wanted.is_planted(path)]
    files = {**wanted.settings, **wanted.files, **hidden}
    caches = {str(Path(path).parent / "__pycache__") for path in files}
    for command in _removals((*planted, *wanted.gone, *files, *sorted(caches))):
        done = await sandbox.exec(command, timeout_s=TIMEOUT_S)
        if done.exit_code:
            return f"cannot restore the tests: {done.output[-300:]}"
    for path, data in files.items():
        if refused := await put(sandbox, path, data):
            return refused
    return ""


async def put(sandbox: Sandbox, path: str, data: bytes) -> str:
    """Write a file; return why the sandbox's own file system refused it, else ''."""
    try:
        await sandbox.put(path, data)
    except SandboxLost:
        raise
    except OSError as error:
        return f"cannot put the tests in place: {error}"
    return ""


def untouched(image: Path, name: str) -> bytes:
    """Return a file of the image. Raises GradingError when it is not there."""
    try:
        path = within(image / "testbed", name)
        return path.read_bytes()
    except TaskError as error:
        raise GradingError(str(error)) from error
    except OSError as error:
        raise GradingError(f"test file {path}: {error.strerror}; is the image whole?") from error


@lru_cache(maxsize=512)
def _plan(
    image: str, instance_id: str, test_files: tuple[str, ...], test_patch: str, fix: str
) -> Restoration:
    del instance_id  # part of the key: an image may be made anew under another task's name
    testbed = Path(image, "testbed")
    changed = touched(test_patch)
    there = [path for path in changed if within(testbed, path).is_file()]
    before = {path: (testbed / path).read_bytes() for path in there}
    after = applied(test_patch, before) if test_patch else {}
    kept = {path: untouched(Path(image), path) for path in test_files if path not in after}
    spared = frozenset(touched(fix)) - set(after) - set(kept)
    settings = {path: within(testbed, path).read_bytes() for path in _steering(testbed)}
    return Restoration(
        files=kept | {path: data for path, data in after.items() if data is not None},
        gone=tuple(path for path, data in after.items() if data is None),
        settings={path: data for path, data in settings.items() if path not in spared},
        root=frozenset(os.listdir(testbed)),
        spared=spared,
    )


def _steering(testbed: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(testbed):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in set(names) & set(STEERING):
            yield str(Path(folder, name).relative_to(testbed))


def _any_of(names: Iterable[str]) -> str:
    """Return find's words for a file of one of `names`."""
    return " -o ".join(f"-name {name}" for name in names)


def _removals(paths: Iterable[str]) -> Iterator[str]:
    """Yield commands that remove `paths`, each short enough for one argument."""
    batch: list[str] = []
    for path in paths:
        batch.append(path)
        if sum(map(len, batch)) > _BATCH_BYTES:
            yield _removal(batch)
            batch = []
    if batch:
        yield _removal(batch)


def _removal(paths: Sequence[str]) -> str:
    """Remove, also out of folders that were closed to writing."""
    folders = dict.fromkeys(path.rpartition("/")[0] or "." for path in paths)
    opened = f"chmod u+rwx -- {shlex.join(folders)} 2>/dev/null"
    return f"{opened}; rm -rf -- {shlex.join(paths)}"


def _is_below(path: str, paths: Iterable[str]) -> bool:
    return any(other.startswith(f"{path}/") for other in paths)
