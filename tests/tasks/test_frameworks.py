"""What each framework's log says, and which logs cannot be believed."""

from __future__ import annotations

import pytest

from agentrl.tasks.frameworks import PARSERS, doubt, names_of, results_of, worst

PYTEST = """\
tests/test_a.py::test_one PASSED                                         [ 25%]
tests/test_a.py::test_two[a b] FAILED                                    [ 50%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
SKIPPED [1] tests/test_a.py:9: not here
XFAIL tests/test_a.py::test_three - known
FAILED tests/test_a.py::test_two[a b] - AssertionError: a - b
ERROR tests/test_b.py
============== 1 failed, 1 passed, 1 skipped, 1 xfailed in 0.03s ===============
"""
UNITTEST = """\
test_one (auth.tests.Case.test_one) ... ok
test_two (auth.tests.Case.test_two)
Two is told. ... noise on stdout
ok
test_three (auth.tests.Case.test_three) ... FAIL
test_four (auth.tests.Case.test_four) ... skipped 'no database'
test_five (auth.tests.Case.test_five) ... expected failure
test_six (auth.tests.Case.test_six) ... unexpected success

======================================================================
FAIL: test_three (auth.tests.Case.test_three)
----------------------------------------------------------------------
Ran 6 tests in 0.002s

FAILED (failures=1, skipped=1, expected failures=1, unexpected successes=1)
"""
LOGS = {
    "sympy": ("test_abs ok\ntest_sign F\ntest_pow E\ntest_sqrt f\n", "test_abs", "test_sign"),
    "go": (
        "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestB/sub (0.01s)\n",
        "TestA",
        "TestB/sub",
    ),
    "cargo": (
        "test a::tests::one ... ok\ntest src/lib.rs - f (line 3) ... FAILED\ntest b ... ignored\n",
        "a::tests::one",
        "src/lib.rs - f (line 3)",
    ),
    "jest": (
        "  ✓ adds two (5 ms)\n  ✕ takes one (1.5 s)\n  ○ skipped later\n",
        "adds two",
        "takes one",
    ),
    "tap": (
        "ok 1 - adds two\nnot ok 2 - takes one\nok 3 later # SKIP no\n",
        "adds two",
        "takes one",
    ),
}


def test_pytests_summary_and_verbose_lines_are_read_the_worst_counting() -> None:
    found = worst(results_of("pytest-log", f"\x1b[32m{PYTEST}\x1b[0m"))
    assert found["tests/test_a.py::test_one"] == "PASSED"
    assert found["tests/test_a.py::test_two[a b]"] == "FAILED"
    assert found["tests/test_a.py::test_three"] == "XFAIL"
    assert found["tests/test_b.py"] == "ERROR"
    assert not any(name.startswith("[1]") for name in found)


def test_unittests_lines_are_read_around_docstrings_and_noise() -> None:
    found = worst(results_of("unittest", UNITTEST))
    case = "auth.tests.Case"
    assert found[f"test_one ({case}.test_one)"] == "PASSED"
    assert found["Two is told."] == found[f"test_two ({case}.test_two)"] == "PASSED"
    assert found[f"test_three ({case}.test_three)"] == "FAILED"
    assert found[f"test_four ({case}.test_four)"] == "SKIPPED"
    assert found[f"test_five ({case}.test_five)"] == "XFAIL"
    assert found[f"test_six ({case}.test_six)"] == "FAILED"


@pytest.mark.parametrize("framework", LOGS)
def test_other_frameworks_say_passes_and_failures_their_own_way(framework: str) -> None:
    log, passed, failed = LOGS[framework]
    found = worst(results_of(framework, log))
    assert (found[passed], found[failed]) == ("PASSED", "FAILED")
    assert set(found.values()) <= {"PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL"}


def test_ids_of_pytest_are_known_by_what_rows_call_them() -> None:
    assert names_of("t.py::TestA::test_b[x y]") == (
        "t.py::TestA::test_b[x y]",
        "t.py::TestA::test_b[x",
        "TestA.test_b[x y]",
    )
    assert "t.py::test_b[/file]" in names_of("t.py::test_b[/tmp/pytest-1/file]")


@pytest.mark.parametrize("framework", [name for name in PARSERS if name])
def test_passes_before_a_failing_end_without_a_failure_are_not_believed(framework: str) -> None:
    assert "exit code 1" in doubt(framework, "a PASSED\n", 1)


def test_passes_that_the_runner_does_not_count_are_not_believed() -> None:
    forged = "PASSED tests/test_a.py::test_ten\nPASSED tests/test_a.py::test_eleven\n"
    assert doubt("pytest-log", PYTEST, 1) == ""
    assert "itself counts" in doubt(
        "pytest-log", forged + forged.replace("test_", "t_") + PYTEST, 1
    )
    assert "counts none" in doubt("pytest-log", forged, 0)
    assert doubt("unittest", UNITTEST, 1) == ""
    lines = "".join(f"test_{n} (a.B) ... ok\n" for n in range(20))
    assert "itself counts" in doubt("unittest", lines + UNITTEST, 1)


def test_every_log_of_a_failed_run_with_a_failure_is_believed() -> None:
    for framework, (log, _, _) in LOGS.items():
        assert doubt(framework, log, 1) == ""
