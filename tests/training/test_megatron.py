"""Both back ends held equal; needs megatron-core beside torch, and no GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fabricate import run_ranks
from megatron_ranks import CASES, RUN, make_family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),  # of the one fixture: six cases in two processes
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.20'",
    ),
]


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, in two processes: a file for each rank that passed one, or why it failed."""
    root = tmp_path_factory.mktemp("megatron")
    for family in {case[0] for case in CASES}:
        make_family(root / family, family)
    try:
        run_ranks(root, "megatron_ranks:all_cases", 2, str(root))
    except AssertionError as error:
        (root / "failed").write_text(str(error))
    return root


def assert_passed(passed: Path, case: object) -> None:
    failed = passed / "failed"
    why = failed.read_text() if failed.exists() else ""
    assert all((passed / f"{case} {rank}").exists() for rank in range(2)), why


@pytest.mark.parametrize("case", CASES, ids=str)
def test_megatron_and_torch_agree_to_1e_5(passed, case):
    assert_passed(passed, case)


def test_a_run_by_the_loop_resumes_as_if_it_had_never_stopped(passed):
    assert_passed(passed, RUN)
