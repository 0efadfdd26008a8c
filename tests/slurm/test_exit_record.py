"""Exit records and the ledger: files that outlive the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import errors
from slurm import exit_record, ledger


def test_a_role_s_record_is_read_back(odd_path: Path) -> None:
    try:
        raise errors.ConfigError("training.steps=0: must be 1 or more")
    except errors.ConfigError as error:
        record = exit_record.from_error("trainer", 0, error, step=3, started=1.0)
    exit_record.write(odd_path, record)
    assert exit_record.read(odd_path, "trainer", 0) == record
    assert (record.code, record.cause, record.step) == (2, "usage", 3)
    assert "raise errors.ConfigError" in record.traceback


def test_an_absent_record_is_none_and_a_torn_one_an_error(tmp_path: Path) -> None:
    assert exit_record.read(tmp_path, "trainer", 0) is None
    path = exit_record.path_of(tmp_path, "trainer", 0)
    path.parent.mkdir()
    path.write_text('{"role": "tra')
    with pytest.raises(errors.RecordError, match="not readable"):
        exit_record.read(tmp_path, "trainer", 0)


@pytest.mark.parametrize(
    ("code", "found"),
    [(-9, (137, "killed")), (137, (137, "killed")), (3, (3, "failed")), (0, (1, "failed"))],
)
def test_a_role_without_a_record_gets_one_from_its_code(code: int, found: tuple[int, str]) -> None:
    record = exit_record.synthesise("trainer", 0, code, step=0, started=0.0)
    assert (record.code, record.cause, record.is_synthesised) == (*found, True)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (errors.Interrupted("asked"), (75, "saved")),
        (errors.TemplateError("not append-only"), (2, "usage")),
        (errors.SandboxUnavailable("no bwrap"), (2, "usage")),
        (errors.TooManyInfraFailures("table"), (1, "infra_limit")),
        (errors.LaunchError("budget"), (1, "launch")),
        (errors.WaitTimeout("no groups"), (1, "infra")),
        (OSError(28, "No space left"), (1, "infra")),
        (ZeroDivisionError(), (1, "failed")),
    ],
)
def test_what_was_raised_becomes_a_code_and_a_cause(
    error: Exception, found: tuple[int, str]
) -> None:
    assert exit_record.classify(error) == found


def test_a_restarted_role_keeps_the_record_of_its_earlier_life(tmp_path: Path) -> None:
    exit_record.set_aside(tmp_path, "trainer", 0)
    for code in (1, 75, 0):
        exit_record.set_aside(tmp_path, "trainer", 0)
        exit_record.write(tmp_path, exit_record.from_code("trainer", 0, code, step=0, started=0))
    names = sorted(path.name for path in (tmp_path / "exit").iterdir())
    assert names == ["trainer-0.1.json", "trainer-0.2.json", "trainer-0.json"]
    assert exit_record.restarts(tmp_path) == 2
    assert exit_record.read(tmp_path, "trainer", 0).cause == "done"  # type: ignore[union-attr]


def test_the_ledger_bears_a_torn_last_line(tmp_path: Path) -> None:
    lines = [
        ledger.LedgerLine(
            attempt=n,
            began="started",
            is_by_person=True,
            ended="killed",
            action="lost",
            code=1,
            step_begin=n,
            step_end=n + 1,
        )
        for n in (1, 2)
    ]
    assert ledger.read(tmp_path) == []
    ledger.append(tmp_path, lines[0])
    with (tmp_path / ledger.NAME).open("ab") as file:
        file.write(b'{"attempt": 2, "beg')
    assert ledger.read(tmp_path) == lines[:1]
    ledger.append(tmp_path, lines[1])
    assert ledger.read(tmp_path) == lines
