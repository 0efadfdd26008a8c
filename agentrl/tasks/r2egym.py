"""R2E-Gym's rows: tests are in the row, and what each must say; the fix is the commit's own files.

Of what a row expects, only PASSED can be asked for here; R2E-Gym itself also wants its expected
failures to fail, so this is the milder judge.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec

from agentrl.errors import TaskError
from agentrl.tasks.frameworks import results_of
from agentrl.tasks.patches import from_texts
from agentrl.tasks.records import read_records
from agentrl.tasks.swesmith import pytest_command, with_setup
from agentrl.tasks.task import Task

FOLDER = "r2e_tests"
_COLOUR = re.compile(r"\x1b\[\d+m")


class R2eGymRow(msgspec.Struct, frozen=True, kw_only=True):
    """The published columns that decide."""

    repo_name: str
    docker_image: str
    commit_hash: str
    problem_statement: str
    parsed_commit_content: str
    execution_result_content: str
    expected_output_json: str


class _Path(msgspec.Struct, frozen=True):
    path: str


class _Header(msgspec.Struct, frozen=True):
    file: _Path


class _FileDiff(msgspec.Struct, frozen=True):
    header: _Header
    old_file_content: str | None = ""
    new_file_content: str | None = ""


class _Commit(msgspec.Struct, frozen=True):
    file_diffs: list[_FileDiff]
    old_commit_hash: str = ""


class _Execution(msgspec.Struct, frozen=True):
    test_file_codes: list[str]
    test_file_names: list[str]
    old_commit_res_stdout: str | None = ""


def read_r2egym(path: Path, *, setup: str = "") -> list[Task]:
    """Read rows of R2E-Gym. setup: shell text before each test command. Raises TaskError."""
    return [_task(row, setup) for row in read_records(path, R2eGymRow, "R2E-Gym")]


def _task(row: R2eGymRow, setup: str) -> Task:
    name = f"{row.repo_name}-{row.commit_hash}"
    try:
        commit = msgspec.json.decode(row.parsed_commit_content, type=_Commit)
        ran = msgspec.json.decode(row.execution_result_content, type=_Execution)
        expected: dict[str, str] = json.loads(row.expected_output_json)
    except ValueError as error:
        raise TaskError(f"task {name}: its JSON columns are not R2E-Gym's: {error}") from error
    before = dict(results_of("r2e", ran.old_commit_res_stdout or ""))
    wanted = [_plain(key) for key, status in expected.items() if status == "PASSED"]
    paths = [f"{FOLDER}/{file}" for file in ran.test_file_names]
    hidden = {path: code.encode() for path, code in zip(paths, ran.test_file_codes, strict=True)}
    return Task(
        instance_id=name,
        repo=row.repo_name,
        problem_statement=_issue(row.problem_statement),
        patch="",
        gold=_gold(commit),
        fail_to_pass=tuple(key for key in wanted if before.get(key) != "PASSED"),
        pass_to_pass=tuple(key for key in wanted if before.get(key) == "PASSED"),
        image_name=row.docker_image,
        base_commit=commit.old_commit_hash or f"{row.commit_hash}^",
        test_command=with_setup(setup, pytest_command([shlex.quote(FOLDER)])),
        framework="r2e",
        hidden_files=hidden,
        cluster=name,
    )


def _gold(commit: _Commit) -> str:
    """Return the commit's change of what is no test."""
    return from_texts(
        (one.header.file.path, one.old_file_content or "", one.new_file_content or "")
        for one in commit.file_diffs
        if not re.search(r"(^|/)(tests?/|test_|conftest)|_test\.py$", one.header.file.path)
    )


def _plain(key: str) -> str:
    return _COLOUR.sub("", key).partition(" - ")[0]


def _issue(text: str) -> str:
    inside = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", text, re.DOTALL)
    return inside[1].strip() if inside else text
