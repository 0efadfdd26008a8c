"""The generator's own rows, as JSONL; columns that we do not know are let be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import TaskError
from agentrl.handoff.publish import publish_bytes
from agentrl.tasks.repair import Row
from agentrl.tasks.task import Task

T_ = TypeVar("T_")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Publish `rows` as JSONL."""
    publish_bytes(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """Read rows of the generator. Raises TaskError with the line that is none."""
    return _read(path, Row)


def to_task(row: Row) -> Task:
    """Return what the agent, the sandbox and the grader need of a generated row."""
    return Task(
        instance_id=row.instance_id,
        repo=row.repo,
        problem_statement=row.problem_statement,
        patch=row.patch,
        fail_to_pass=tuple(row.FAIL_TO_PASS),
        pass_to_pass=tuple(row.PASS_TO_PASS),
        image_name=row.image_name,
        test_command=row.test_command,
        test_files=tuple(row.test_files),
        cluster=f"{row.function}/{row.site}/{row.replacement}",
        fix=row.fix,
        rivals=tuple(row.rivals),
        files=row.files,
    )


def _read(path: Path, kind: type[T_]) -> list[T_]:
    if not path.is_file():
        raise TaskError(f"tasks {path}: no such file; run `prepare`, or set tasks.folder")
    decoder = msgspec.json.Decoder(kind)
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise TaskError(f"{path}:{number}: not a row of SWE-smith's schema: {error}") from error
    return found
