"""NCCL's own account of its networks, in the forms of its versions, against the plan."""

from __future__ import annotations

import pytest

from slurm.nccl_log import Used, differences, parse
from slurm.network import NodePlan

HEAD = "n7:929:929 [2] NCCL INFO "
OLD = HEAD + "Bootstrap : Using [0]eth0:172.17.0.2<0>"
COMMON = HEAD + "Bootstrap : Using ib0:11.5.5.50<0>"
NEW = HEAD + "Bootstrap: Using ib0:11.5.5.50<0>"
SIX = HEAD + "Bootstrap : Using ib0:fe80::a288:c203:d2:aaf2%ib0<0>"
IB = HEAD + "NET/IB : Using [0]mlx5_3:1/IB [1]mlx5_2:1/IB ; OOB ib0:11.5.5.50<0>"
ROCE = HEAD + "NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB ib0:11.5.5.50<0>"
SOCKETS = HEAD + "NET/Socket : Using [0]ib0:11.5.5.50<0> [1]docker0:172.17.0.1<0>"


def planned(*rdma: str) -> NodePlan:
    return NodePlan(interface="ib0", address="11.5.5.50", environment={}, rdma=rdma)


@pytest.mark.parametrize(
    ("line", "interface", "address"),
    [
        (OLD, "eth0", "172.17.0.2"),
        (COMMON, "ib0", "11.5.5.50"),
        (NEW, "ib0", "11.5.5.50"),
        (SIX, "ib0", "fe80::a288:c203:d2:aaf2"),
    ],
)
def test_the_bootstrap_line_of_every_version_is_read(
    line: str, interface: str, address: str
) -> None:
    assert list(parse([line])) == [Used(what="bootstrap", interface=interface, address=address)]


def test_a_log_that_follows_the_plan_has_no_differences() -> None:
    lines = [NEW, IB, ROCE, HEAD + "Using network IB", "step 1 loss 0.3"]
    assert differences(lines, planned("mlx5_3:1")) == []


def test_another_bootstrap_interface_is_told_once() -> None:
    assert differences([OLD, OLD], planned()) == [
        "NCCL's bootstrap uses eth0 172.17.0.2, not ib0 11.5.5.50 as planned"
    ]


def test_every_socket_interface_is_compared() -> None:
    assert differences([SOCKETS], planned()) == [
        "NCCL's socket uses docker0 172.17.0.1, not ib0 11.5.5.50 as planned"
    ]


@pytest.mark.parametrize("said", ["Using network Socket", "NET/IB : No device found."])
def test_a_fall_back_to_tcp_is_told_only_where_there_is_rdma(said: str) -> None:
    assert differences([HEAD + said], planned()) == []
    assert "mlx5_3:1 is ACTIVE" in differences([HEAD + said], planned("mlx5_3:1"))[0]
