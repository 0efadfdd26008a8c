"""The decision after a role's end: a table, and that no failure goes on for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.exit_record import CAUSES, ExitRecord
from slurm.ledger import LedgerLine, attempts_without_progress
from slurm.states import worst
from slurm.verdict import Limits, Situation, decide

LIMITS = Limits(max_attempts_without_progress=3, max_trainer_restarts=2, max_inference_restarts=1)
CODES = {"done": 0, "saved": 75, "usage": 2, "killed": 137}


def end(cause: str, role: str = "trainer", step: int = 0, node: int = 0) -> ExitRecord:
    return ExitRecord(role=role, node=node, code=CODES.get(cause, 1), cause=cause, step=step)


def line(attempt: int, begin: int, finish: int, by_person: bool = False) -> LedgerLine:
    return LedgerLine(
        attempt=attempt,
        began="",
        is_by_person=by_person,
        ended="",
        action="requeue",
        code=1,
        step_begin=begin,
        step_end=finish,
    )


FRUITLESS = (line(1, 0, 0, by_person=True), line(2, 0, 0))
TABLE: list[tuple[str, list[ExitRecord], dict[str, Any], str, int]] = [
    ("the trainer finished", [end("done")], {}, "done", 0),
    ("saved, nobody knows why", [end("saved")], {}, "stop", 75),
    ("saved for a person", [end("saved")], {"asked": "person", "step_now": 5}, "stop", 75),
    ("saved ahead of the limit", [end("saved")], {"asked": "limit", "step_now": 5}, "requeue", 0),
    (
        "saved, but no step for K attempts",
        [end("saved")],
        {"asked": "limit", "history": FRUITLESS},
        "stop",
        1,
    ),
    ("wrong config", [end("usage")], {"step_now": 9}, "stop", 2),
    ("wrong config of inference", [end("usage", "inference")], {"step_now": 9}, "stop", 2),
    ("too many sandboxes fail", [end("infra_limit", "inference")], {"step_now": 9}, "stop", 1),
    ("killed at once", [end("killed")], {}, "restart_trainer", 0),
    ("failed after a checkpoint", [end("failed", step=5)], {"step_now": 5}, "restart_trainer", 0),
    ("failed before any", [end("failed")], {}, "stop", 1),
    ("failed twice at one step", [end("failed", step=5)] * 2, {"step_now": 5}, "requeue", 0),
    ("restart budget used up", [end("killed")] * 3, {}, "requeue", 0),
    ("budget used up, K attempts", [end("killed")] * 3, {"history": FRUITLESS}, "stop", 1),
    (
        "a person began anew",
        [end("killed")] * 3,
        {"history": FRUITLESS, "is_by_person": True},
        "requeue",
        0,
    ),
    ("inference killed", [end("killed", "inference")], {}, "restart_inference", 0),
    ("inference killed twice", [end("killed", "inference")] * 2, {}, "requeue", 0),
    (
        "each node has its budget",
        [end("killed", "inference", node=n) for n in (0, 1)],
        {},
        "restart_inference",
        0,
    ),
    ("engines' budget ended", [end("launch", "inference")], {}, "requeue", 0),
    ("inference has no more to do", [end("done", "inference")], {}, "wait", 0),
    ("inference leaves first", [end("killed", "inference")], {"asked": "person"}, "wait", 0),
    ("killed while it saved", [end("killed")], {"asked": "person"}, "stop", 75),
    ("killed at the limit", [end("killed")], {"asked": "limit", "step_now": 5}, "requeue", 0),
]


@pytest.mark.parametrize(
    ("records", "facts", "action", "code"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_verdict(records: list[ExitRecord], facts: dict[str, Any], action: str, code: int) -> None:
    verdict = decide(Situation(records=tuple(records), **facts), LIMITS)
    assert (verdict.action, verdict.code) == (action, code), verdict.reason


def test_the_message_of_the_role_is_in_the_reason() -> None:
    record = ExitRecord(
        role="inference", node=0, code=1, cause="infra_limit", message="36 of 40 tries"
    )
    assert "36 of 40 tries" in decide(Situation(records=(record,)), LIMITS).reason


ends = st.tuples(
    st.sampled_from(CAUSES),
    st.sampled_from(["trainer", "inference"]),
    st.sampled_from(["", "limit"]),
)


@pytest.mark.slow
@given(st.lists(ends, min_size=60, max_size=60))
def test_no_sequence_without_progress_outlives_its_budget(
    sequence: list[tuple[str, str, str]],
) -> None:
    """Launches and starts are bounded; `wait` starts nothing."""
    history: list[LedgerLine] = []
    records: list[ExitRecord] = []
    launches, starts = 1, 2
    for cause, role, asked in sequence:
        records.append(end(cause, role))
        facts = Situation(
            records=tuple(records), history=tuple(history), is_by_person=launches == 1, asked=asked
        )  # type: ignore[arg-type]
        action = decide(facts, LIMITS).action
        if action in ("done", "stop"):
            break
        starts += action.startswith("restart")
        if action == "requeue":
            history.append(line(launches, 0, 0, by_person=launches == 1))
            records = []
            launches, starts = launches + 1, starts + 2
    assert launches <= LIMITS.max_attempts_without_progress
    assert starts <= launches * (2 + LIMITS.max_trainer_restarts + LIMITS.max_inference_restarts)


@given(st.lists(st.booleans(), max_size=8))
def test_attempts_are_counted_back_to_the_newest_that_advanced(advanced: list[bool]) -> None:
    lines = [line(i, 0, int(step)) for i, step in enumerate(advanced)]
    newest = max((i for i, step in enumerate(advanced) if step), default=-1)
    assert attempts_without_progress(lines) == len(lines) - 1 - newest


def test_a_live_state_wins_else_the_worst() -> None:
    assert worst(["COMPLETED", "RUNNING", "FAILED"]) == "RUNNING"
    assert worst(["COMPLETED", "CANCELLED", "FAILED"]) == "FAILED"
    assert worst(["completed"]) == "COMPLETED"
    assert worst([]) == "UNKNOWN"
