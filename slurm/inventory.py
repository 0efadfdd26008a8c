"""What one node has to talk through: interfaces, addresses, RDMA ports.

`python -m slurm.inventory` prints it as JSON.
Links are read from /sys; addresses by psutil, which asks the kernel's getifaddrs as NCCL does and
is there in images that have no iproute2. Where /sys is of another network namespace than this
process (`unshare -n` without a new mount of it), links come from psutil and ethtool instead.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import psutil

UP, LOOPBACK_TYPE, ETHERNET_TYPE = 0x1, 772, 1
"""IFF_UP of <net/if.h>; ARPHRD_LOOPBACK and ARPHRD_ETHER of <net/if_arp.h>."""
WAITING_STATES = ("dormant", "testing")
"""operstate of a link that has a carrier and may not be used yet (RFC 2863), as under 802.1X."""
VIRTUAL_DEVTYPES = ("vlan", "macvlan", "ipvlan", "vxlan", "wireguard", "geneve", "bond", "bridge")
MARKS = {"bonding": "bond", "bridge": "bridge", "tun_flags": "tun"}
"""An entry of /sys/class/net/NAME that only such an interface has."""
DRIVERS = {"bonding": "bond", "802.1Q VLAN Support": "vlan"}
"""ethtool's driver names that differ from the kind's; `veth`, `bridge`, `dummy` are alike."""
SIOCETHTOOL, ETHTOOL_GDRVINFO = 0x8946, 0x3


class Address(msgspec.Struct, frozen=True, order=True):
    ip: str
    """No %scope."""
    prefix: int

    @property
    def interface(self) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
        return parsed(self.ip, self.prefix)


@cache
def parsed(ip: str, prefix: int) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    return ipaddress.ip_interface(f"{ip}/{prefix}")


class Interface(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    kind: str
    """`physical`, `loopback`, `bond`, `bridge`, `veth`, `tun`, `vlan`, …; `virtual` if unknown."""
    is_up: bool = True
    is_running: bool = True
    """It has a carrier. Not operstate "up", which the kernel sets as much as a second later."""
    mtu: int = 1500
    speed_mbps: int = 0
    """0: not known, as with many virtual machines."""
    addresses: tuple[Address, ...] = ()
    """In getifaddrs' order: NCCL takes the first."""
    master: str = ""
    """The bond or bridge of which it is a port."""
    peer: str = ""
    """The other end of a veth, where that is on this node too."""
    numa_node: int = -1
    rdma: tuple[str, ...] = ()
    """ACTIVE RDMA ports behind it, as `mlx5_0:1`."""


class RdmaPort(msgspec.Struct, kw_only=True, frozen=True):
    device: str
    port: int
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, …"""
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE)."""
    numa_node: int = -1
    interface: str = ""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


class Inventory(msgspec.Struct, kw_only=True, frozen=True):
    """One node's; as JSON it is what the picker of every node reads."""

    node: str
    """Slurm's name of it: two inventories with the same one are of the same node."""
    interfaces: tuple[Interface, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    host: str = ""

    @property
    def active_rdma(self) -> tuple[str, ...]:
        """Ports with a link, as `mlx5_0:1`."""
        return tuple(port.name for port in self.rdma_ports if port.state == "ACTIVE")


Addresses = Mapping[str, tuple[Address, ...]]


def take(
    root: Path = Path("/"), *, node: str = "", addresses: Addresses | None = None
) -> Inventory:
    """Return the inventory of this node, its links as `root`/sys has them.

    node: Slurm's name, else SLURMD_NODENAME, else the host's. addresses: by interface; asked of
    the kernel if left out, and then /sys is checked to be of this process's network.
    """
    ports = rdma_ports(root)
    if addresses is None:
        addresses = kernel_addresses()
        links = sysfs_links(root) if is_of_this_network(root) else kernel_links()
    else:
        links = sysfs_links(root)
    host = socket.gethostname()
    return Inventory(
        node=node or os.environ.get("SLURMD_NODENAME") or host.split(".")[0],
        interfaces=tuple(_complete(link, addresses, ports) for link in links),
        rdma_ports=ports,
        host=host,
    )


def _complete(link: Interface, addresses: Addresses, ports: Iterable[RdmaPort]) -> Interface:
    active = [one for one in ports if one.state == "ACTIVE" and one.interface == link.name]
    return msgspec.structs.replace(
        link,
        addresses=addresses.get(link.name, ()),
        rdma=tuple(port.name for port in active),
    )


# /sys


def sysfs_links(root: Path) -> list[Interface]:
    """Return the links of `root`/sys/class/net, without addresses."""
    folder = root / "sys/class/net"
    folders = [entry for entry in sorted(folder.glob("*")) if entry.is_dir()]
    indices = {one.name: (_number(one / "ifindex"), _number(one / "iflink")) for one in folders}
    return [
        _sysfs_link(one, _peer(one.name, indices), is_real=root == Path("/")) for one in folders
    ]


def _sysfs_link(folder: Path, peer: str, *, is_real: bool) -> Interface:
    kind = _sysfs_kind(folder)
    if kind == "virtual" and is_real:
        kind = driver_kind(folder.name)
    master = folder / "master"
    return Interface(
        name=folder.name,
        kind=kind,
        is_up=bool(_number(folder / "flags") & UP),
        is_running=_number(folder / "carrier") == 1
        and _text(folder / "operstate") not in WAITING_STATES,
        mtu=_number(folder / "mtu"),
        speed_mbps=max(0, _number(folder / "speed")),  # -1 without a link
        master=master.resolve().name if master.exists() else "",
        peer=peer if kind == "veth" else "",
        numa_node=_number(folder / "device/numa_node", absent=-1),
    )


def _sysfs_kind(folder: Path) -> str:
    if _number(folder / "type") == LOOPBACK_TYPE:
        return "loopback"
    for mark, kind in MARKS.items():
        if (folder / mark).exists():
            return kind
    told = dict(line.split("=", 1) for line in _text(folder / "uevent").splitlines() if "=" in line)
    if told.get("DEVTYPE") in VIRTUAL_DEVTYPES:
        return told["DEVTYPE"]
    if (folder / "device").exists():
        return "physical"
    own, other = _number(folder / "ifindex"), _number(folder / "iflink")
    if other not in (0, own) and _number(folder / "type") == ETHERNET_TYPE:
        return "veth"  # of the links without a device or a mark only veth names another as its peer
    return "dummy" if folder.name.startswith("dummy") else "virtual"


def _peer(name: str, indices: Mapping[str, tuple[int, int]]) -> str:
    """Return the interface here that `name` is joined to and that is joined to it."""
    own, other = indices[name]
    return next((one for one, pair in indices.items() if pair == (other, own) and one != name), "")


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return tuple(_rdma_port(folder) for folder in folders)


def _rdma_port(folder: Path) -> RdmaPort:
    device, port = folder.parents[1], int(folder.name)
    return RdmaPort(
        device=device.name,
        port=port,
        state=_text(folder / "state").partition(":")[2].strip(),  # "4: ACTIVE"
        link_layer=_text(folder / "link_layer"),
        numa_node=_number(device / "device/numa_node", absent=-1),
        interface=_netdev(folder, port),
    )


def _netdev(folder: Path, port: int) -> str:
    """Return the interface of an RDMA port: of RoCE by its GID, of IPoIB by its function's port."""
    if told := _text(folder / "gid_attrs/ndevs/0"):
        return told
    for net in sorted(folder.parents[1].glob("device/net/*")):
        if _number(net / "dev_port") == port - 1:
            return net.name
    return ""


def _text(path: Path) -> str:
    """Return a file of /sys; "" where there is none, or the driver has no answer (EINVAL)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, *, absent: int = 0) -> int:
    text = _text(path)
    return int(text, 0) if text else absent


# The kernel


def kernel_addresses() -> dict[str, tuple[Address, ...]]:
    """Return IPv4 and IPv6 addresses by interface, in this process's network namespace."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        inet = [one for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        found[name] = tuple(_address(one.address, one.netmask) for one in inet)
    return found


def _address(address: str, netmask: str | None) -> Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    bits = int(ipaddress.ip_address(netmask)) if netmask else 2**ip.max_prefixlen - 1
    return Address(str(ip), bits.bit_count())


def is_of_this_network(root: Path) -> bool:
    """Whether /sys shows this process's interfaces: same names, indices, hardware addresses."""
    folder = root / "sys/class/net"
    shown = {one.name: one for one in folder.glob("*") if one.is_dir()}
    if {name: _number(one / "ifindex") for name, one in shown.items()} != {
        name: index for index, name in socket.if_nameindex()
    }:
        return False
    return all(
        _text(shown[name] / "address") == entry.address.lower()
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == psutil.AF_LINK and name in shown and _is_ethernet(shown[name])
    )


def _is_ethernet(folder: Path) -> bool:
    return _number(folder / "type") == ETHERNET_TYPE


def kernel_links() -> list[Interface]:
    """Return the links as psutil and ethtool tell them: no ports of a bridge, no NUMA node."""
    return [
        Interface(
            name=name,
            kind="loopback" if "loopback" in stats.flags.split(",") else driver_kind(name),
            is_up="up" in stats.flags.split(","),
            is_running="running" in stats.flags.split(","),
            mtu=stats.mtu,
            speed_mbps=stats.speed,
        )
        for name, stats in sorted(psutil.net_if_stats().items())
    ]


def driver_kind(name: str) -> str:
    """Return the kind by the driver's own name (ethtool -i); `virtual` if it has none."""
    answer = ctypes.create_string_buffer(struct.pack("I192x", ETHTOOL_GDRVINFO))
    request = struct.pack("16sP16x", name.encode(), ctypes.addressof(answer))  # struct ifreq
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        call = (handle.fileno(), ctypes.c_ulong(SIOCETHTOOL), ctypes.create_string_buffer(request))
        if ctypes.CDLL(None, use_errno=True).ioctl(*call):
            return "virtual"  # its driver has no name, or no driver
    # struct ethtool_drvinfo: cmd, driver[32], version[32], fw_version[32], bus_info[32], …
    driver, bus = (_c_string(answer.raw[at : at + 32]) for at in (4, 100))
    if ":" in bus or bus.startswith(("virtio", "usb")):
        return "physical"
    return DRIVERS.get(driver, driver) or "virtual"


def _c_string(data: bytes) -> str:
    return data.split(b"\0")[0].decode(errors="replace")


def main() -> int:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(take()), indent=1).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
