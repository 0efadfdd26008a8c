"""The classifier on lines of the form that drivers and SGLang give them.

Each fixture is named by its kind. Xid 109, HSA's lack of resources and RCCL's error are written by
their format alone: they were not met.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.faults import _COMPILED, Kind, LogReader, classify

LOGS = Path(__file__).parent / "fixtures" / "logs"
FAULTY = sorted(path for path in LOGS.glob("*.*.log"))


@pytest.mark.parametrize("path", FAULTY, ids=lambda path: path.stem)
def test_a_log_is_named_by_its_fault(path: Path) -> None:
    found = LogReader()
    found.feed(path.read_text())
    assert found.end() is not None
    assert found.cause is not None
    assert found.cause.kind == path.name.split(".")[0]


def test_every_kind_and_every_pattern_has_a_line_of_its_form() -> None:
    lines = [line for path in FAULTY for line in path.read_text().splitlines()]
    assert {path.name.split(".")[0] for path in FAULTY} == set(get_args(Kind))
    unmatched = [one.pattern for _, one in _COMPILED if not any(map(one.search, lines))]
    assert unmatched == []


def test_a_log_of_ordinary_life_has_no_fault_and_no_odd_line() -> None:
    reader = LogReader()
    assert reader.feed((LOGS / "quiet.log").read_text()) is None
    assert not reader.unknown


@given(st.data())
def test_pieces_of_any_size_say_the_same_as_the_whole(data: st.DataObject) -> None:
    text = (LOGS / "memory_access.nvidia.log").read_text()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    reader = LogReader()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        reader.feed(text[start:end])
    assert reader.kinds == {"scheduler": 1, "memory_access": 2}


def test_lines_that_look_like_errors_and_are_not_known_are_counted_by_shape() -> None:
    reader = LogReader()
    reader.feed("QuantumError: bit 17 lost\nQuantumError: bit 3 lost\nall is well\n")
    assert reader.unknown == {"QuantumError: bit N lost": 2}
    assert reader.acting is None


def test_the_cause_is_named_and_not_what_followed_from_it() -> None:
    reader = LogReader()
    reader.feed("Scheduler hit an exception: Traceback\nHIP out of memory.\nNCCL error: abort\n")
    assert reader.acting is not None
    assert reader.cause is not None
    assert reader.cause.kind == "out_of_memory"


@given(st.text())
def test_any_line_is_classified_or_not_without_an_error(line: str) -> None:
    found = classify(line)
    assert found is None or len(found.text) <= 500


def test_an_optional_import_that_failed_is_no_fault_and_a_failed_one_explains_an_end() -> None:
    reader = LogReader()
    reader.feed("[TP0] Ignore import error when loading x: No module named 'helion'\n")
    assert reader.cause is None
    assert reader.feed("ImportError: libcudart.so.13: cannot open shared object file\n") is None
    assert reader.cause is not None, "it says why, should the process end"
    reader.forget()
    assert reader.cause is None


def test_a_model_that_the_scheduler_cannot_load_is_named_and_not_the_scheduler() -> None:
    reader = LogReader()
    reader.feed((LOGS / "model.no_weights.log").read_text())
    assert reader.cause is not None
    assert reader.cause.is_lasting


def test_what_a_running_engine_misses_is_no_reason_not_to_start_it_again() -> None:
    reader = LogReader()
    reader.forget()
    reader.feed("ImportError: no PIL\nsize mismatch for lm_head.weight: refused, the old goes on\n")
    assert reader.cause is None
    reader.feed("ImportError: sys.meta_path is None\nScheduler hit an exception: Traceback\n")
    reader.feed("ImportError: sys.meta_path is None, Python is likely shutting down\n")
    assert reader.cause is not None
    assert reader.cause.kind == "scheduler"


def test_a_fault_that_ends_an_engine_stays_the_cause_whatever_follows() -> None:
    reader = LogReader()
    reader.feed("HIP out of memory.\nImportError: while shutting down\n")
    assert reader.cause == reader.acting
