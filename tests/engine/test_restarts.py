"""What follows from faults, on a clock that is moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import EngineConfig
from agentrl.config_engine import SglangConfig
from agentrl.engine.restarts import MAX_BACKOFF_S, Fault, FaultHistory

CONFIG = EngineConfig(
    kind="sglang", count=4, max_restarts=3, graph_faults=3, suspect_faults=3, graphs_off_s=1800
)
WITHOUT_GRAPHS = {
    "embedded": EngineConfig(graph_faults=1),
    "sglang on a CPU": EngineConfig(
        kind="sglang", graph_faults=1, sglang=SglangConfig(device="cpu")
    ),
}


def fault(cause: str) -> Fault:
    return Fault(cause=cause, detail=f"a {cause}")


def test_restarts_back_off_and_end_when_the_budget_is_spent() -> None:
    history = FaultHistory(config=CONFIG)
    verdicts = [history.note(0, fault("exit"), at) for at in (0, 10, 20, 30)]
    assert [one.delay_s for one in verdicts[:3]] == [1.0, 2.0, 4.0]
    assert "engine.max_restarts=3" in verdicts[3].gives_up
    assert not history.note(1, fault("exit"), 31).gives_up, "each engine has its own budget"


def test_the_budget_is_over_ten_minutes() -> None:
    history = FaultHistory(config=CONFIG)
    assert not any(history.note(0, fault("exit"), at * 250.0).gives_up for at in range(50))


@pytest.mark.parametrize("cause", ["import", "model"])
def test_what_a_restart_cannot_mend_is_given_up_at_once(cause: str) -> None:
    verdict = FaultHistory(config=CONFIG).note(0, fault(cause), 0)
    assert verdict.gives_up == "the next start would meet the same"


def test_graphs_go_off_for_the_engine_that_keeps_faulting_and_come_back() -> None:
    history = FaultHistory(config=CONFIG)
    graphs = [history.note(0, fault("memory_access"), at).graphs for at in (0, 700, 1400)]
    assert graphs == [True, True, False]
    assert history.has_graphs(1, 1400)
    assert history.graphs_return_in(0, 1500) == pytest.approx(1700)
    assert history.has_graphs(0, 1400 + CONFIG.graphs_off_s)
    assert history.graphs_return_in(0, 1400 + CONFIG.graphs_off_s) is None


@pytest.mark.parametrize("kind", WITHOUT_GRAPHS)
def test_an_engine_that_has_no_graphs_is_not_started_anew_for_their_return(kind: str) -> None:
    history = FaultHistory(config=WITHOUT_GRAPHS[kind])
    assert all(history.note(0, fault("hang"), at * 300.0).graphs for at in range(3))
    assert history.graphs_return_in(0, 601) is None


@pytest.mark.parametrize("cause", ["out_of_memory", "port", "version", "start"])
def test_faults_that_graphs_do_not_cause_leave_them_on(cause: str) -> None:
    history = FaultHistory(config=CONFIG)
    assert all(history.note(0, fault(cause), at * 300.0).graphs for at in range(5))


def test_faults_of_several_engines_make_the_node_a_suspect_and_of_one_do_not() -> None:
    one, several = FaultHistory(config=CONFIG), FaultHistory(config=CONFIG)
    assert not any(one.note(0, fault("hang"), at).suspect for at in (0, 1, 2))
    verdicts = [several.note(at % 2, fault("hang"), at) for at in (0, 1, 2)]
    assert "3 faults of 2 engines" in verdicts[2].suspect
    assert not verdicts[1].suspect


@pytest.mark.parametrize("cause", ["hardware", "gpu_lost"])
def test_one_broken_gpu_makes_the_node_a_suspect(cause: str) -> None:
    assert cause in FaultHistory(config=CONFIG).note(0, fault(cause), 0).suspect


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2000)), max_size=60))
def test_no_engine_ever_has_more_than_its_restarts_in_ten_minutes(
    faults: list[tuple[int, float]],
) -> None:
    history, at, starts = FaultHistory(config=CONFIG), 0.0, dict[int, list[float]]()
    for engine, gap in faults:
        at += gap
        verdict = history.note(engine, fault("hang"), at)
        assert 0 <= verdict.delay_s <= MAX_BACKOFF_S
        if not verdict.gives_up:
            starts.setdefault(engine, []).append(at)
    for times in starts.values():
        assert all(b - a > 600 for a, b in zip(times, times[3:], strict=False))
