"""The picker over made inventories: what it takes, what it refuses, and with what reasons."""

from __future__ import annotations

import ipaddress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import NetworkError
from slurm.inventory import Address, Interface, Inventory, RdmaPort
from slurm.network import NetworkPlan, plan
from slurm.network_rank import natural

Nodes = dict[str, Inventory]
NODES = ("trn0", "inf0", "inf1", "inf2")


def nic(name: str, *ips: str, kind: str = "physical", **facts: object) -> Interface:
    """One interface; an address is written `10.0.0.1/24`."""
    pairs = [ip.split("/") for ip in ips]
    addresses = tuple(Address(ip, int(prefix)) for ip, prefix in pairs)
    return Interface(name=name, kind=kind, addresses=addresses, **facts)  # type: ignore[arg-type]


LO = nic("lo", "127.0.0.1/8", "::1/128", kind="loopback")


def docker(kind: str = "bridge") -> Interface:
    return nic("docker0", "172.17.0.1/16", kind=kind)


def cluster(*rows: str, extra: tuple[Interface, ...] = (), **facts: object) -> Nodes:
    """Nodes that have, of each row `eth0 10.0.0.{}/24`, the address with their number."""
    made = {}
    for at, node in enumerate(NODES, start=1):
        named = [row.replace("{}", str(at)).split() for row in rows]
        own = [nic(name, *ips, **facts) for name, *ips in named]  # type: ignore[arg-type]
        made[node] = Inventory(node=node, interfaces=(LO, *extra, *own))
    return made


def with_nic(nodes: Nodes, node: str, *added: Interface) -> Nodes:
    """The same, with `added` in place of the interfaces of those names on `node`."""
    names = {one.name for one in added}
    kept = tuple(one for one in nodes[node].interfaces if one.name not in names)
    return {**nodes, node: Inventory(node=node, interfaces=(*kept, *added))}


def names(made: NetworkPlan) -> set[str]:
    return {one.interface for one in made.nodes.values()}


def refusal(nodes: Nodes, **wishes: object) -> str:
    with pytest.raises(NetworkError) as caught:
        plan(nodes, **wishes)  # type: ignore[arg-type]
    return str(caught.value)


# What it takes


def test_the_nic_of_all_nodes_is_taken_and_docker0_is_not() -> None:
    made = plan(cluster("eth0 10.0.0.{}/24", extra=(docker(),)))
    assert names(made) == {"eth0"}
    assert made.nodes["inf1"].environment == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": "10.0.0.1",
    }


def test_the_evidence_says_why_docker0_was_not_taken() -> None:
    made = plan(cluster("eth0 10.0.0.{}/24", extra=(docker(),)))
    assert made.why == "no other network has all nodes"
    told = "docker0 172.17.0.1/16: the same address on inf0, inf1, inf2, trn0"
    assert any(one.startswith(told) for one in made.refused)


@pytest.mark.parametrize("kind", ["physical", "bond", "vlan", "veth", "bridge", "virtual"])
def test_one_address_on_two_nodes_is_refused_whatever_its_kind(kind: str) -> None:
    assert names(plan(cluster("eth0 10.0.0.{}/24", extra=(docker(kind),)))) == {"eth0"}
    assert "the same address on" in refusal(cluster(extra=(docker(kind),)))


def test_duplicates_on_a_compose_bridge_count_across_different_names() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    for at, node in enumerate(NODES):
        nodes = with_nic(nodes, node, nic(f"br-{at}abc", "172.18.0.1/16"))
    assert names(plan(nodes)) == {"eth0"}


def test_a_duplicate_on_a_down_interface_counts_too() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24", speed_mbps=1)
    fast = nic("fast", "10.0.0.9/24", speed_mbps=9)
    nodes = with_nic(with_nic(nodes, "inf0", fast), "inf1", nic("old", "10.0.0.9/24", is_up=False))
    assert plan(nodes).nodes["inf0"].interface != "fast"


def test_the_address_of_a_hosts_file_is_no_candidate() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", extra=(nic("lo1", "127.0.1.1/8", kind="dummy"),))
    assert names(plan(nodes)) == {"eth0"}


def test_the_faster_network_wins_over_the_management_one() -> None:
    nodes = cluster("hsn0 10.2.0.{}/16", speed_mbps=200_000)
    for at, node in enumerate(NODES):
        nodes = with_nic(nodes, node, nic("eno1", f"10.0.0.{at + 1}/24", speed_mbps=1000))
    assert names(plan(nodes)) == {"hsn0"}


def test_a_hint_wins_over_speed() -> None:
    nodes = cluster("hsn0 10.2.0.{}/16", speed_mbps=10)
    for at, node in enumerate(NODES):
        nodes = with_nic(nodes, node, nic("eno1", f"10.0.0.{at + 1}/24", speed_mbps=1000))
    assert plan(nodes).why == "before 10.2.0.0/16 by speed"
    assert names(plan(nodes, hints=("ib*", "hsn*"))) == {"hsn0"}
    assert plan(nodes, hints=("hsn*",)).why == "before 10.0.0.0/24 by hint"


def test_of_equals_the_first_name_by_number_is_taken() -> None:
    assert names(plan(cluster("eth10 10.1.0.{}/24", "eth2 10.2.0.{}/24"))) == {"eth2"}
    assert natural("eth2") < natural("eth10")


def test_an_interface_with_rdma_behind_it_wins_over_an_equal() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", speed_mbps=100)
    for at, node in enumerate(NODES):
        rdma = nic("eth9", f"10.9.0.{at + 1}/24", speed_mbps=100, rdma=("mlx5_0:1",))
        nodes = with_nic(nodes, node, rdma)
    assert names(plan(nodes)) == {"eth9"}


def test_equal_mtus_win_over_rdma_and_a_difference_is_told() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    nodes = with_nic(nodes, "inf0", nic("eth0", "10.0.0.2/24", mtu=9000))
    assert names(plan(nodes)) == {"eth1"}
    assert plan(nodes, pin="eth0").warnings == (
        "10.0.0.0/24: MTU differs: trn0 1500, inf0 9000, inf1 1500, inf2 1500",
    )


def test_a_bond_is_taken_and_its_ports_are_not() -> None:
    ports = nic("eth0", "10.7.0.1/24", master="bond0")
    nodes = cluster("bond0 10.0.0.{}/24", extra=(ports,), kind="bond")
    assert names(plan(nodes)) == {"bond0"}


def test_names_may_differ_from_node_to_node() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    bare = Inventory(node="inf0", interfaces=(LO, nic("enp7s0", "10.0.0.2/24")))
    made = plan({**nodes, "inf0": bare})
    assert made.nodes["inf0"].environment["NCCL_SOCKET_IFNAME"] == "enp7s0"
    assert made.nodes["inf1"].environment["GLOO_SOCKET_IFNAME"] == "eth0"


def test_two_nics_in_one_subnet_give_the_same_name_everywhere_and_a_warning() -> None:
    made = plan(cluster("eth1 10.0.0.1{}/24", "eth0 10.0.0.2{}/24"))
    assert names(made) == {"eth0"}
    assert "trn0 has eth0, eth1 in it" in made.warnings[0]


def test_a_prefix_of_another_name_is_pinned_exactly_for_nccl_and_plainly_for_gloo() -> None:
    nodes = with_nic(cluster("eth1 10.0.0.{}/24"), "inf0", nic("eth10", is_up=False))
    made = plan(nodes)
    assert made.nodes["inf0"].environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert made.nodes["inf0"].environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert made.nodes["inf1"].environment["NCCL_SOCKET_IFNAME"] == "eth1"


def test_ipv6_alone_is_enough_and_says_its_family() -> None:
    made = plan(cluster("eth0 fd00::{}/64 fe80::{}/64"))
    assert made.nodes["inf0"].environment["MASTER_ADDR"] == "fd00::1"
    assert made.nodes["inf0"].environment["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_ipv4_wins_over_ipv6_on_the_same_interface() -> None:
    made = plan(cluster("eth0 10.0.0.{}/24 fd00::{}/64"))
    assert made.subnet == "10.0.0.0/24"
    assert "NCCL_SOCKET_FAMILY" not in made.nodes["inf0"].environment


def test_gid_index_and_hca_are_never_set() -> None:
    made = plan(cluster("eth0 10.0.0.{}/24", rdma=("mlx5_0:1",)))
    assert not [key for one in made.nodes.values() for key in one.environment if "_IB_" in key]


def test_in_a_container_the_veth_that_leads_out_is_taken() -> None:
    assert names(plan(cluster("eth0 10.0.0.{}/24", kind="veth"))) == {"eth0"}


@pytest.mark.parametrize("name", ["veth12ab", "cali9f", "cni0", "lxc1", "cilium_host"])
def test_a_containers_cable_is_no_way_out(name: str) -> None:
    assert "container's cable" in refusal(cluster(f"{name} 10.0.0.{{}}/24", kind="veth"))


def test_a_veth_beside_a_nic_or_with_both_ends_here_is_not_taken() -> None:
    nodes = cluster("v0 10.0.0.{}/24", kind="veth")
    assert "both ends" in refusal(cluster("v0 10.0.0.{}/24", kind="veth", peer="v1"))
    for at, node in enumerate(NODES):
        nodes = with_nic(nodes, node, nic("eth0", f"10.1.0.{at + 1}/24"))
    assert names(plan(nodes)) == {"eth0"}


@pytest.mark.parametrize("kind", ["bridge", "tun", "vxlan", "dummy", "virtual"])
def test_what_need_not_leave_the_node_is_refused_even_if_unique(kind: str) -> None:
    assert f"a {kind} interface" in refusal(cluster("cni0 10.244.{}.1/24", kind=kind))


@pytest.mark.parametrize("facts", [{"is_up": False}, {"is_running": False}])
def test_an_interface_that_is_down_on_one_node_drops_out(facts: dict[str, bool]) -> None:
    nodes = cluster("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    nodes = with_nic(nodes, "inf1", nic("eth0", "10.0.0.3/24", **facts))
    assert names(plan(nodes)) == {"eth1"}


def test_a_subnet_that_one_node_lacks_is_refused_and_the_node_named() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    nodes = {**nodes, "inf2": Inventory(node="inf2", interfaces=(LO,))}
    assert "10.0.0.0/24: only eth0 of trn0, eth0 of inf0, eth0 of inf1; not on inf2" in refusal(
        nodes
    )


def test_hints_that_match_nothing_are_told() -> None:
    made = plan(cluster("eno1 10.0.0.{}/24"), hints=("hsn*",))
    assert made.warnings == (
        "interface_hints=hsn*: no network of all nodes has such names; took eno1",
    )


def test_nodes_with_fewer_rdma_ports_than_others_are_told() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    port = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", link_layer="InfiniBand")
    nodes["inf0"] = msgspec.structs.replace(nodes["inf0"], rdma_ports=(port,))
    made = plan(nodes)
    assert made.nodes["inf0"].rdma == ("mlx5_0:1",)
    told = "number of ACTIVE RDMA ports differs: trn0 0, inf0 1, inf1 0, inf2 0"
    assert made.warnings == (told,)


def test_a_thousand_nodes_are_ranked_in_seconds_and_fill_no_message() -> None:
    nodes = {
        f"n{at}": Inventory(
            node=f"n{at}",
            interfaces=(LO, docker(), nic("eth0", f"10.0.{at // 250}.{at % 250 + 1}/16")),
        )
        for at in range(1000)
    }
    made = plan(nodes)
    assert len(made.nodes) == 1000
    assert max(len(one) for one in made.refused) < 300


# Routed networks and proofs


def test_different_subnets_count_only_once_reach_is_proved() -> None:
    nodes = cluster("hsn0 10.0.{}.5/24")
    assert "hsn0 IPv4 (routed): mutual reach is not proved" in refusal(nodes)
    made = plan(nodes, reach={"hsn0 IPv4 (routed)": ""})
    assert made.nodes["inf2"].address == "10.0.4.5"


def test_a_choice_whose_proof_failed_gives_way_to_the_next() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    made = plan(nodes, reach={"10.0.0.0/24": "inf0 asked inf1: no answer", "10.1.0.0/24": ""})
    assert names(made) == {"eth1"}
    assert "10.0.0.0/24: inf0 asked inf1: no answer" in made.refused


# Pins


def test_a_pin_wins_over_every_rank_and_kind() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", speed_mbps=100)
    for at, node in enumerate(NODES):
        nodes = with_nic(nodes, node, nic("br0", f"10.3.0.{at + 1}/24", kind="bridge"))
    assert names(plan(nodes)) == {"eth0"}
    assert names(plan(nodes, pin="br0")) == {"br0"}


def test_a_pin_can_be_a_network_where_names_differ() -> None:
    nodes = cluster("eth0 10.0.0.{}/24", "eth1 10.3.0.{}/24")
    nodes = with_nic(nodes, "inf0", nic("eth1"), nic("enp1s0", "10.3.0.2/24"))
    assert names(plan(nodes, pin="10.3.0.0/16")) == {"eth1", "enp1s0"}


def test_a_pin_that_one_node_lacks_is_refused() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    for node in NODES[:3]:
        nodes = with_nic(nodes, node, nic("hsn0", f"10.5.0.{NODES.index(node) + 1}/24"))
    assert "hsn0: not on inf2, which has lo, eth0" in refusal(nodes, pin="hsn0")


def test_a_pin_that_is_nowhere_is_refused_with_what_there_is() -> None:
    said = refusal(cluster("eth0 10.0.0.{}/24"), pin="ib7")
    assert "interface_pin='ib7': none fits trn0, inf0, inf1, inf2" in said
    assert "ib7: not on inf1, which has lo, eth0" in said


def test_a_pin_with_the_same_address_on_two_nodes_is_refused() -> None:
    said = refusal(cluster("eth0 10.0.0.{}/24", extra=(docker(),)), pin="docker0")
    assert "docker0 172.17.0.1/16: the same address on inf0, inf1, inf2, trn0" in said


def test_a_pin_without_an_address_or_carrier_is_refused() -> None:
    bare = cluster("eth0 10.0.0.{}/24", extra=(nic("ib0"),))
    assert "ib0: has no address" in refusal(bare, pin="ib0")
    down = cluster("eth0 10.0.0.{}/24", is_running=False)
    assert "no carrier" in refusal(down, pin="eth0")


def test_a_pin_that_is_no_network_is_refused_in_pythons_words() -> None:
    assert "does not appear to be" in refusal(cluster("eth0 10.0.0.{}/24"), pin="10.0.0/zz")


# One node


def test_one_node_takes_its_nic_and_without_one_its_loopback() -> None:
    one = Inventory(node="box", interfaces=(LO, docker(), nic("eth0", "10.0.0.1/24")))
    assert plan({"box": one}).nodes["box"].interface == "eth0"
    alone = Inventory(node="box", interfaces=(LO, docker()))
    assert plan({"box": alone}).nodes["box"].environment["MASTER_ADDR"] == "127.0.0.1"


def test_one_node_under_two_keys_is_refused() -> None:
    one = Inventory(node="box", interfaces=(LO, nic("eth0", "10.0.0.1/24")))
    assert "one node appears twice" in refusal({"trainer-0": one, "inference-0": one})


def test_a_trainer_of_no_inventory_is_refused_and_a_named_one_is_the_master() -> None:
    nodes = cluster("eth0 10.0.0.{}/24")
    assert "no inventory of it" in refusal(nodes, trainer="inf9")
    assert plan(nodes, trainer="inf0").nodes["trn0"].environment["MASTER_ADDR"] == "10.0.0.2"


# For all


ADDRESSES = st.integers(0, 3).map(lambda at: f"10.{at % 2}.0.{at + 1}/24")
NICS = st.builds(
    nic,
    st.sampled_from(["eth0", "eth1", "eth10", "docker0", "br-1f"]),
    ADDRESSES,
    kind=st.sampled_from(["physical", "bond", "bridge", "veth"]),
    speed_mbps=st.sampled_from([0, 1000, 100_000]),
    mtu=st.sampled_from([1500, 9000]),
    is_up=st.booleans(),
)
MACHINES = st.lists(
    st.lists(NICS, max_size=4, unique_by=lambda one: one.name), min_size=1, max_size=4
).map(
    lambda lists: {
        f"n{at}": Inventory(node=f"n{at}", interfaces=(LO, *nics)) for at, nics in enumerate(lists)
    }
)


@given(MACHINES, st.sampled_from(["", "eth0", "docker0", "10.0.0.0/8"]))
def test_no_address_that_two_nodes_have_is_ever_picked(nodes: Nodes, pin: str) -> None:
    try:
        made = plan(nodes, pin=pin)
    except NetworkError:
        return
    owners = [at.ip for one in nodes.values() for i in one.interfaces for at in i.addresses]
    for one in made.nodes.values():
        ip = ipaddress.ip_address(one.address)
        assert (ip.is_loopback and len(nodes) == 1) or owners.count(one.address) >= 1
        holders = [
            node
            for node, inventory in nodes.items()
            if any(one.address == at.ip for i in inventory.interfaces for at in i.addresses)
        ]
        assert len(holders) == 1
    assert set(made.nodes) == set(nodes)


@given(MACHINES)
def test_the_order_of_interfaces_does_not_matter(nodes: Nodes) -> None:
    turned = {
        node: Inventory(node=node, interfaces=one.interfaces[::-1]) for node, one in nodes.items()
    }
    answers = []
    for one in (nodes, turned):
        try:
            answers.append({node: p.address for node, p in plan(one).nodes.items()})
        except NetworkError:
            answers.append({})
    assert answers[0] == answers[1]
