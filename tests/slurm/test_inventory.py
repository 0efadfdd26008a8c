"""The inventory of a laid-out /sys, and of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm.inventory import Address, Interface, Inventory, take

ETHER = {
    "type": "1",
    "flags": "0x1003",
    "carrier": "1",
    "operstate": "up",
    "mtu": "9000",
    "iflink": "2",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "the node's root"


def lay(root: Path, name: str, *entries: str, **files: str) -> Path:
    """Lay /sys/class/net/NAME, as folders the `entries` that end in a slash."""
    folder = root / "sys/class/net" / name
    for entry in entries:
        (folder / entry).mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in {**ETHER, "ifindex": "2", **files}.items():
        (folder / file).write_text(text + "\n")
    return folder


def lay_port(root: Path, device: str, port: int, **files: str) -> Path:
    folder = root / f"sys/class/infiniband/{device}/ports/{port}"
    folder.mkdir(parents=True)
    for file, text in {"state": "4: ACTIVE", "link_layer": "InfiniBand", **files}.items():
        (folder / file).write_text(text + "\n")
    return folder


def only(root: Path, **addresses: tuple[Address, ...]) -> Interface:
    return take(root, node="n0", addresses=addresses).interfaces[0]


def test_a_nic_is_physical_by_its_device(root: Path) -> None:
    folder = lay(root, "hsn0", "device/", speed="200000")
    (folder / "device/numa_node").write_text("3\n")
    ip = Address("10.0.0.1", 24)
    assert only(root, hsn0=(ip,)) == Interface(
        name="hsn0", kind="physical", mtu=9000, speed_mbps=200000, addresses=(ip,), numa_node=3
    )


@pytest.mark.parametrize(
    ("kind", "entries", "files"),
    [
        ("loopback", (), {"type": "772"}),
        ("bond", ("bonding/",), {"uevent": "DEVTYPE=bond"}),
        ("bridge", ("bridge/", "brif/"), {}),
        ("tun", (), {"tun_flags": "0x1002"}),
        ("vlan", (), {"uevent": "DEVTYPE=vlan\nINTERFACE=x", "iflink": "7"}),
        ("macvlan", (), {"uevent": "DEVTYPE=macvlan", "iflink": "7"}),
        ("vxlan", (), {"uevent": "DEVTYPE=vxlan"}),
        ("veth", (), {"iflink": "7"}),
        ("virtual", (), {}),
    ],
)
def test_the_kind_is_what_sys_shows_whatever_the_name(
    root: Path, kind: str, entries: tuple[str, ...], files: dict[str, str]
) -> None:
    lay(root, "eth0", *entries, **files)
    assert only(root).kind == kind


def test_a_dummy_has_no_mark_but_its_name(root: Path) -> None:
    lay(root, "dummy0")
    assert only(root).kind == "dummy"


def test_a_veth_whose_other_end_is_here_names_it(root: Path) -> None:
    lay(root, "a", ifindex="3", iflink="4")
    lay(root, "b", ifindex="4", iflink="3")
    lay(root, "c", ifindex="5", iflink="3")
    found = take(root, node="n0", addresses={}).interfaces
    assert [one.peer for one in found] == ["b", "a", ""]


@pytest.mark.parametrize(
    ("flags", "carrier", "state", "is_up", "is_running"),
    [
        ("0x1003", "1", "up", True, True),
        ("0x1003", "1", "unknown", True, True),
        ("0x1003", "1", "down", True, True),  # a link that came up less than a second ago
        ("0x1003", "1", "dormant", True, False),
        ("0x1003", "0", "down", True, False),
        ("0x1003", "0", "lowerlayerdown", True, False),
        ("0x1002", "", "down", False, False),
    ],
)
def test_up_is_what_was_asked_and_running_what_has_a_carrier(
    root: Path, flags: str, carrier: str, state: str, is_up: bool, is_running: bool
) -> None:
    told = {"flags": flags, "carrier": carrier, "operstate": state, "speed": "-1"}
    lay(root, "eth0", "device/", **told)
    found = only(root)
    assert (found.is_up, found.is_running, found.speed_mbps) == (is_up, is_running, 0)


def test_a_port_names_its_bond(root: Path) -> None:
    bond = lay(root, "bond0", "bonding/")
    port = lay(root, "eth0", "device/")
    (port / "master").symlink_to(bond)
    assert take(root, node="n0", addresses={}).interfaces[1].master == "bond0"


def test_rdma_ports_are_joined_to_their_interfaces(root: Path) -> None:
    lay(root, "eth0", "device/")
    lay(root, "ib1", "device/", type="32")
    roce = lay_port(root, "mlx5_0", 1, link_layer="Ethernet")
    (roce / "gid_attrs/ndevs").mkdir(parents=True)
    (roce / "gid_attrs/ndevs/0").write_text("eth0\n")
    lay_port(root, "mlx5_1", 2)
    function = root / "sys/class/infiniband/mlx5_1/device"
    (function / "net/ib1").mkdir(parents=True)
    (function / "net/ib1/dev_port").write_text("1\n")
    (function / "numa_node").write_text("1\n")
    made = take(root, node="n0", addresses={})
    assert [one.rdma for one in made.interfaces] == [("mlx5_0:1",), ("mlx5_1:2",)]
    assert [(one.interface, one.numa_node) for one in made.rdma_ports] == [("eth0", -1), ("ib1", 1)]


def test_a_port_that_is_down_is_listed_and_serves_nobody(root: Path) -> None:
    lay(root, "eth0", "device/")
    port = lay_port(root, "mlx5_0", 1, state="1: DOWN")
    (port / "gid_attrs/ndevs").mkdir(parents=True)
    (port / "gid_attrs/ndevs/0").write_text("eth0\n")
    made = take(root, node="n0", addresses={})
    assert (made.interfaces[0].rdma, made.rdma_ports[0].state) == ((), "DOWN")


def test_an_empty_sys_gives_an_empty_inventory(root: Path) -> None:
    assert take(root, node="n0", addresses={}).interfaces == ()


def test_an_inventory_survives_json() -> None:
    made = take()
    assert msgspec.json.decode(msgspec.json.encode(made), type=Inventory) == made
    assert any(one.kind == "loopback" for one in made.interfaces)


def test_the_name_is_slurms_if_it_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "nid000017")
    assert take().node == "nid000017"


def test_the_command_prints_what_the_kernel_has() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm.inventory"], capture_output=True, text=True, check=True
    )
    found = {one["name"]: one for one in json.loads(done.stdout)["interfaces"]}
    assert {"ip": "127.0.0.1", "prefix": 8} in found["lo"]["addresses"]


def test_sys_of_another_network_is_not_believed() -> None:
    """`unshare -n` without a new /sys shows the old one's interfaces there."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no unshare and ip")
    lines = "ip link add br-1f type bridge && ip link add v0 type veth peer name v1 && exec "
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{lines} "$0" -m slurm.inventory', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("namespaces are refused here")
    found = {one["name"]: one["kind"] for one in json.loads(done.stdout)["interfaces"]}
    assert found == {"lo": "loopback", "br-1f": "bridge", "v0": "veth", "v1": "veth"}
