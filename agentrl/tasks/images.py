"""Makes the folder that a task's sandbox starts from: one commit, so no later one shows the fix."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import TaskError
from agentrl.tasks.patches import git, touched
from agentrl.tasks.task import Task

_IDENTITY = (
    "-c",
    "user.name=task",
    "-c",
    "user.email=task@localhost",
    "-c",
    "commit.gpgsign=false",
)


def repository_of(folder: Path, task: Task) -> Path | None:
    """Return the git repository that lies in `folder` for a task: owner__name, or plain name."""
    names = (task.repo.replace("/", "__"), task.repo.rpartition("/")[2])
    found = (folder / f"{name}{ending}" for name in names if name for ending in ("", ".git"))
    return next((path for path in found if path.is_dir()), None)


def make_from_repository(image: Path, repository: Path, task: Task) -> Path:
    """Make a task's image: the files of its base commit, its bug laid over them, as one commit.

    Raises TaskError in git's words.
    """

    def fill(testbed: Path) -> None:
        commit = task.base_commit or "HEAD"
        archive = git("archive", "--format=tar", commit, cwd=repository)
        if archive.returncode:
            raise TaskError(
                f"task {task.instance_id}: {repository} has no {commit}: "
                f"{archive.stderr.decode().strip()}; fetch it there"
            )
        testbed.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(testbed, filter="tar")
        lay_bug(task, testbed)

    return made(image, task, fill)


def lay_bug(task: Task, testbed: Path) -> None:
    """Apply what makes the bug, where the task has that. Raises TaskError in git's words."""
    if task.patch:
        _run(task, testbed, "apply", "--whitespace=nowarn", "-", given=task.patch)


def made(
    image: Path, task: Task, fill: Callable[[Path], None], *, with_ignored: bool = True
) -> Path:
    """Make `image`/testbed by `fill(folder)` and commit what it holds, unless it is there.

    with_ignored: all of it is the repository's. Else what git ignores, as an environment there or
    what was built, is left out of the commit, but for files that the task's patches touch.
    Safe under several processes at once.
    """
    testbed = image / "testbed"
    if testbed.is_dir():
        return image
    image.mkdir(parents=True, exist_ok=True)
    temporary = image / f".testbed.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        fill(temporary)
        _commit(task, temporary, with_ignored=with_ignored)
        temporary.rename(testbed)
    except OSError:
        if not testbed.is_dir():  # else another process was first, with the same files
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return image


def later_commits(repository: Path) -> int:
    """Return how many commits its git can reach that HEAD cannot: a fix may be among them."""
    if not (repository / ".git").exists():
        return 0
    found = git("rev-list", "--count", "--all", "--reflog", "--not", "HEAD", cwd=repository)
    return int(found.stdout) if found.returncode == 0 else 0


def _commit(task: Task, testbed: Path, *, with_ignored: bool) -> None:
    _run(task, testbed, "init", "-q", "-b", "main")
    _run(task, testbed, "add", "-A", *(["--force"] if with_ignored else []))
    patches = "\n".join((task.patch, task.gold, task.test_patch))
    if named := [path for path in touched(patches) if (testbed / path).is_file()]:
        _run(task, testbed, "add", "--force", "--", *named)
    _run(task, testbed, *_IDENTITY, "commit", "-q", "--allow-empty", "-m", "Initial commit")


def _run(task: Task, testbed: Path, *words: str, given: str = "") -> None:
    done = git(*words, cwd=testbed, given=given)
    if done.returncode:
        raise TaskError(f"task {task.instance_id}: git {words[0]}: {done.stderr.decode().strip()}")
