"""SWE-smith's rows: `patch` makes the bug, its reverse is the fix, and tests are named by id."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import msgspec

from agentrl.tasks.records import ids_of, read_records
from agentrl.tasks.task import Task

PYTEST = "python -m pytest -rA --color=no --tb=short -p no:cacheprovider"
LONGEST_COMMAND = 100_000
"""Bytes. Linux refuses an argument of 128 KiB; past this the whole suite is run."""


class SweSmithRow(msgspec.Struct, frozen=True, kw_only=True):
    """The published columns, and those of our own that say how its tests are run."""

    instance_id: str
    patch: str
    FAIL_TO_PASS: list[str] | str
    PASS_TO_PASS: list[str] | str
    image_name: str = ""
    repo: str = ""
    base_commit: str = ""
    problem_statement: str = ""
    test_command: str = ""
    test_files: list[str] = []
    framework: str = ""


def read_swesmith(path: Path, *, setup: str = "") -> list[Task]:
    """Read rows of SWE-smith. setup: shell text before each test command. Raises TaskError."""
    return [_task(row, setup) for row in read_records(path, SweSmithRow, "SWE-smith")]


def _task(row: SweSmithRow, setup: str) -> Task:
    fail_to_pass = ids_of(row.FAIL_TO_PASS, row.instance_id)
    pass_to_pass = ids_of(row.PASS_TO_PASS, row.instance_id)
    files = tuple(row.test_files) or files_of((*fail_to_pass, *pass_to_pass))
    command = row.test_command or pytest_command(files)
    return Task(
        instance_id=row.instance_id,
        repo=row.repo,
        problem_statement=row.problem_statement,
        patch=row.patch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        image_name=row.image_name or f"images/{row.instance_id}",
        base_commit=row.base_commit,
        test_command=with_setup(setup, command),
        framework=row.framework or framework_of(command),
        test_files=files,
        cluster=row.instance_id,
    )


def files_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the test files that pytest's ids name, in order."""
    return tuple(dict.fromkeys(name.partition("::")[0] for name in names if "::" in name))


def pytest_command(files: Iterable[str]) -> str:
    """Return the command that runs these test files, or the whole suite where they are too many."""
    words = shlex.join(files)
    return PYTEST if len(words) > LONGEST_COMMAND else f"{PYTEST} {words}".rstrip()


def with_setup(setup: str, command: str) -> str:
    return f"{setup} && {command}" if setup else command


def framework_of(command: str) -> str:
    """Return whose results a command's are: `pytest` if that runs, else that of plain lines."""
    return "pytest" if "pytest" in command or "py.test" in command else ""
