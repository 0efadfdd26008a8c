"""Both back ends held equal; needs megatron-core beside torch, and no GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
from fabricate import run_ranks
from megatron_ranks import (
    CASES,
    HALF,
    MOVES,
    ONE_RANK,
    REFUSALS,
    RUN,
    SFT,
    Numbers,
    make_family,
    note,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # of the one fixture: its cases in two processes
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.20'",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[object], list[Numbers]]:
    """All cases, gone through by two processes: the numbers of each, or why there are none."""
    root = tmp_path_factory.mktemp("megatron")
    for family in {case[0] for case in CASES}:
        make_family(root / family, family)
    why = ""
    try:
        run_ranks(root, "megatron_ranks:all_cases", 2, str(root))
    except AssertionError as error:
        why = str(error)

    def of(case: object) -> list[Numbers]:
        notes = [note(str(root), case, rank) for rank in range(2)]
        assert all(path.exists() for path in notes), why
        return [json.loads(path.read_bytes()) for path in notes]

    return of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_megatron_and_torch_agree_to_1e_5(found, case):
    for numbers in found(case):
        assert max(numbers[name] for name in ("logprobs", "weights", "gaps")) < 1e-5, numbers
        assert numbers["moved"] > 1e-6, numbers
        assert numbers["metrics"] < 1e-4, numbers


@pytest.mark.parametrize("case", [*CASES, HALF], ids=str)
def test_a_rank_holds_what_was_told_of_it(found, case):
    ranks = found(case)
    (told,) = {numbers["parameters told"] for numbers in ranks}
    assert max(numbers["parameters"] for numbers in ranks) == told
    most = max(numbers["bytes"] for numbers in ranks)
    assert most == pytest.approx(ranks[0]["bytes told"], rel=0.03)  # shards end at multiples


def test_replay_reroutes_as_often_on_any_cut(found):
    cases = [case for case in CASES if "replayed" in case[0] and ONE_RANK not in case[0]]
    shares = {numbers["rerouted"] for case in cases for numbers in found(case)}
    assert len(cases) == 2
    assert len(shares) == 1
    assert 0.1 < shares.pop() < 0.9


def test_balance_is_told_alike_by_any_cut(found):
    cases = [case for case in CASES if case[0] == "qwen3_moe, balanced"]
    told = [numbers["router_balance"] for case in cases for numbers in found(case)]
    assert len(told) == 6
    assert max(told) - min(told) < 1e-6 < min(told) - 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_is_taken_over_by_either_back_end(found, case):
    for numbers in found(case):
        assert numbers["resumed"] == 0, numbers
        assert numbers["resumed by torch"] < 1e-5, numbers


def test_a_state_is_taken_over_on_another_cut(found):
    every = [numbers for case in CASES for numbers in found(case)]
    apart = [one["resumed on another cut"] for one in every if "resumed on another cut" in one]
    assert len(apart) == 2 * len(MOVES)
    assert max(apart) < 1e-5


def test_what_megatron_cannot_do_is_refused_with_words(found):
    for said in found(REFUSALS):
        assert said["shape"].startswith("model.norm.weight is [8] in the checkpoint and [32] in")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_te_without_transformer_engine_says_what_to_install_or_set(found):
    for said in found(REFUSALS):
        assert "Transformer Engine does not import here" in said["te"]
        assert "set training.megatron_layers=local" in said["te"]


def test_a_loop_over_experts_is_refused_and_routers_compute_in_float32(found):
    for said in found(REFUSALS):
        assert "1 of 1 layers without grouped experts, so with a loop over them" in said["loop"]
        assert said["router"] == "torch.float32"


def test_a_gradient_that_is_no_number_changes_no_weight_on_any_stage(found):
    for said in found(REFUSALS):
        assert said["no number"].startswith("update 1: gradient norm nan")
        assert float(said["moved since"]) == 0


def test_a_run_by_the_loop_resumes_as_if_it_had_never_stopped(found):
    numbers, _ = found(RUN)
    assert numbers["resumed"] == 0 < numbers["moved"]


def test_traces_are_learned_by_both_back_ends_alike(found):
    numbers, _ = found(SFT)
    assert numbers["weights"] < 1e-5, numbers
    assert numbers["losses"] < 1e-5, numbers
    assert numbers["learned"] > 0.1, numbers
