"""Rows of SWE-bench and its kin (Verified, SWE-Gym): `patch` is the fix, `test_patch` the tests."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from agentrl.errors import TaskError
from agentrl.tasks.patches import touched
from agentrl.tasks.records import ids_of, read_records
from agentrl.tasks.swesmith import files_of, framework_of, pytest_command, with_setup
from agentrl.tasks.task import Task

_KEPT = re.compile(r"^(?:\+\+\+ b/|rename to )(.+?)(?:\t.*)?$", re.MULTILINE)
_OWN_RUNNERS = {
    "django/django": (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        "unittest",
    ),
    "sympy/sympy": (
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
        "sympy",
    ),
    "sphinx-doc/sphinx": ("tox --current-env -epy39 -v --", "pytest-log"),
}
"""Repository → what runs its tests and whose results those are; all others are pytest's.
Source: swebench 4, harness/constants/python.py (read, not run here)."""


class SweBenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """The published columns, and those of our own that say how its tests are run."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    FAIL_TO_PASS: list[str] | str
    PASS_TO_PASS: list[str] | str
    image_name: str = ""
    docker_image: str = ""
    difficulty: str | None = ""
    test_command: str = ""
    framework: str = ""


def read_swebench(path: Path, *, setup: str = "") -> list[Task]:
    """Read rows of SWE-bench. setup: shell text before each test command. Raises TaskError."""
    return [_task(row, setup) for row in read_records(path, SweBenchRow, "SWE-bench")]


def _task(row: SweBenchRow, setup: str) -> Task:
    if not row.test_patch.strip():
        raise TaskError(f"task {row.instance_id}: its test_patch is empty, so nothing can decide")
    fail_to_pass = ids_of(row.FAIL_TO_PASS, row.instance_id)
    pass_to_pass = ids_of(row.PASS_TO_PASS, row.instance_id)
    command, framework = _command(row, (*fail_to_pass, *pass_to_pass))
    return Task(
        instance_id=row.instance_id,
        repo=row.repo,
        problem_statement=row.problem_statement,
        patch="",
        gold=row.patch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        image_name=row.image_name or row.docker_image or registry_name(row.instance_id),
        base_commit=row.base_commit,
        test_command=with_setup(setup, command),
        framework=framework,
        test_files=touched(row.test_patch),
        test_patch=row.test_patch,
        difficulty=row.difficulty or "",
        cluster=row.instance_id,
    )


def registry_name(instance_id: str) -> str:
    """Return the published image of an instance: SWE-bench's rule, mini-swe-agent's too."""
    name = instance_id.replace("__", "_1776_").lower()
    return f"docker.io/swebench/sweb.eval.x86_64.{name}:latest"


def _command(row: SweBenchRow, names: tuple[str, ...]) -> tuple[str, str]:
    if row.test_command:
        return row.test_command, row.framework or framework_of(row.test_command)
    files = [path for path in dict.fromkeys(_KEPT.findall(row.test_patch)) if path.endswith(".py")]
    if row.repo not in _OWN_RUNNERS:
        known = dict.fromkeys((*files, *files_of(names)))
        return pytest_command(known), row.framework or "pytest"
    runner, framework = _OWN_RUNNERS[row.repo]
    if row.repo == "django/django":
        files = [_django_label(path) for path in files]
    return f"{runner} {' '.join(files)}", row.framework or framework


def _django_label(path: str) -> str:
    """Return what runtests.py calls a file: tests/a/test_b.py is a.test_b."""
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
