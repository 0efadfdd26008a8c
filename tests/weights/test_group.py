"""Where the trainer and the engines meet for a push."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from agentrl.weights import group as groups


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_meeting_place_listens_on_its_address_alone(address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").is_file():
        pytest.skip("no IPv6 here")
    store = groups.host(address, 2, 30)
    found = psutil.Process().net_connections(kind="tcp")
    places = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
    assert [place.ip for place in places if place.port == store.port] == [address]
    visitor = groups.visit(address, store.port, 2, 30)
    visitor.set("here", "1")
    assert store.get("here") == b"1"
