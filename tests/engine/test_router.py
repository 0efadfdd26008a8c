from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.router import Router

URLS = ["a", "b", "c", "d"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("123456789"), st.sets(st.sampled_from(URLS)))))
def test_only_listed_engines_are_picked_and_a_trajectory_stays_while_its_engine_is_listed(
    moves: list[tuple[str, set[str]]],
) -> None:
    listed: set[str] = set()
    router = Router(lambda: sorted(listed))
    home: dict[str, str] = {}
    for trajectory, now in moves:
        listed.clear()
        listed.update(now)
        url = router.pick(trajectory)
        assert (url is None) == (not listed)
        if url is None:
            continue
        assert url in listed
        if home.get(trajectory) in listed:
            assert url == home[trajectory]
        home[trajectory] = url


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40))
def test_new_trajectories_spread_evenly(engines: int, trajectories: int) -> None:
    router = Router(lambda: URLS[:engines])
    share = Counter(router.pick(str(one)) for one in range(trajectories))
    assert max(share.values()) - min(share[url] for url in URLS[:engines]) <= 1


def test_a_new_trajectory_goes_where_fewer_requests_run() -> None:
    router = Router(lambda: ["a", "b"])
    router.begin("a")
    assert router.pick("new") == "b"


def test_a_failed_engine_is_avoided_unless_it_is_the_only_one() -> None:
    listed = ["a", "b"]
    router = Router(lambda: listed)
    first = router.pick("t")
    assert router.pick("t", avoid={str(first)}) not in (first, None)
    listed.pop()
    assert router.pick("t", avoid={"a"}) == "a"


def test_the_router_forgets_the_oldest_trajectories() -> None:
    router = Router(lambda: ["a", "b"], remembered=10)
    for one in range(1000):
        router.pick(str(one))
    assert len(router._home) == 10
    assert sum(router._assigned.values()) == 10
