"""What a node's engines may have: no GPU and no port twice."""

from __future__ import annotations

import socket

import pytest

from agentrl.engine.devices import EngineShare, check_shares, free_ports
from agentrl.errors import ConfigError, LaunchError


def test_two_engines_on_one_gpu_are_refused() -> None:
    shares = [EngineShare(gpus=("0", "1")), EngineShare(gpus=("1", "2"))]
    with pytest.raises(ConfigError, match="GPU 1 is given to two engines"):
        check_shares(shares, engines=2, gpus_per_engine=2)


def test_two_engines_on_one_port_are_refused() -> None:
    shares = [EngineShare(ports=range(30000, 30004)), EngineShare(ports=range(30003, 30006))]
    with pytest.raises(ConfigError, match="port 30003 is given to two engines"):
        check_shares(shares, engines=2, gpus_per_engine=1)


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ([EngineShare()], "1 shares of the node were given"),
        ([EngineShare(gpus=("0",)), EngineShare(gpus=("1",))], "gpus_per_engine=2; they must"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: list[EngineShare], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_shares(shares, engines=2, gpus_per_engine=2)


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        assert taken not in free_ports(2)
        with pytest.raises(LaunchError, match=f"ports {taken} to {taken}: 0 of the 1.*ss -ltnp"):
            free_ports(1, range(taken, taken + 1))


def test_an_engine_sees_its_own_gpus_by_one_mask() -> None:
    share = EngineShare(gpus=("3",), environment={"ROCR_VISIBLE_DEVICES": "3"})
    found = share.environ({"HIP_VISIBLE_DEVICES": "0,1,2,3", "PATH": "/bin"})
    assert found == {"PATH": "/bin", "ROCR_VISIBLE_DEVICES": "3"}
    assert EngineShare().environ({"HIP_VISIBLE_DEVICES": "0"}) == {"HIP_VISIBLE_DEVICES": "0"}
