"""Every address of every node, and why it can or can't serve; what can, best first. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from agentrl.errors import NetworkError
from slurm.inventory import Address, Interface, Inventory, parsed

KINDS = ("physical", "bond", "team", "vlan", "macvlan", "ipvlan")
"""Kinds that lead off the node. A veth does too where it is the only way out: in a container."""
CONTAINER_NAMES = re.compile(
    r"(docker|br-|veth|cni|flannel|cali|lxc|lxd|cilium|virbr|podman|kube|tailscale|wg)"
)
"""Fallback for what has no telling kind."""
ROUTED = " (routed)"
SHOWN = 8

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One address of one node, with what ranks it."""

    node: str
    interface: str
    ip: str
    prefix: int
    mtu: int = 0
    speed_mbps: int = 0
    rdma: tuple[str, ...] = ()

    @property
    def network(self) -> Network:
        return parsed(self.ip, self.prefix).network

    @property
    def version(self) -> int:
        return self.network.version


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One link of every node, that could serve together."""

    label: str
    """The subnet, `10.1.0.0/24`, or `hsn0 IPv4 (routed)` where each node is in another one."""
    links: dict[str, Link]
    """By node."""
    warnings: tuple[str, ...] = ()

    @property
    def is_routed(self) -> bool:
        return self.label.endswith(ROUTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a person asked for."""

    pin: str = ""
    """An interface's name, or a network (10.2.0.0/16): nothing else serves, and it is verified."""
    hints: tuple[str, ...] = ()
    """Names as globs (`hsn*`), the dearest first."""

    def rank(self, interface: str) -> int:
        matches = [at for at, hint in enumerate(self.hints) if fnmatchcase(interface, hint)]
        return matches[0] if matches else len(self.hints)

    def allows(self, interface: str, ip: str) -> bool:
        network = self.network
        if network is None:
            return self.pin in ("", interface)
        return ipaddress.ip_address(ip) in network

    @property
    def network(self) -> Network | None:
        """The pin, if it is written as one."""
        try:
            return ipaddress.ip_network(self.pin, strict=False) if "/" in self.pin else None
        except ValueError as error:
            raise NetworkError(
                f"interface_pin={self.pin!r}: {error}; write a name or a network"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    choices: tuple[Choice, ...]
    """Best first."""
    refused: tuple[str, ...] = ()


def rank(inventories: Mapping[str, Inventory], wishes: Wishes) -> Ranking:
    """Return all choices, best first, and why everything else is none."""
    machines = {one.node: one for one in inventories.values()}
    if len(machines) != len(inventories):
        raise NetworkError(f"inventories of {', '.join(inventories)}: one node appears twice")
    owners = owners_of(machines)
    links: list[Link] = []
    reasons: dict[str, list[str]] = defaultdict(list)
    for node, inventory in machines.items():
        for interface in inventory.interfaces:
            for address in interface.addresses or (None,):
                if reason := unfit(interface, address, inventory, owners=owners, wishes=wishes):
                    on = reasons[f"{_name(interface, address)}: {reason}"]
                    on += [node] * (node not in on)
                elif address is not None:
                    links.append(link_of(node, interface, address))
    missing = _missing_pin(machines, wishes)
    choices, incomplete = group(links, list(machines), wishes)
    refused = [f"{reason} (on {some(nodes)})" for reason, nodes in reasons.items()]
    if not choices and len(machines) == 1 and not wishes.pin:
        choices = _loopback(next(iter(machines.values())))
    return Ranking(choices=tuple(choices), refused=(*missing, *incomplete, *refused))


def owners_of(machines: Mapping[str, Inventory]) -> dict[str, list[str]]:
    """Return the nodes of each address, whatever interface it is on, up or down."""
    owners: dict[str, set[str]] = defaultdict(set)
    for node, inventory in machines.items():
        for interface in inventory.interfaces:
            for address in interface.addresses:
                owners[str(address.interface.ip)].add(node)
    return {ip: sorted(nodes) for ip, nodes in owners.items()}


def unfit(
    interface: Interface,
    address: Address | None,
    inventory: Inventory,
    *,
    owners: Mapping[str, list[str]],
    wishes: Wishes,
) -> str:
    """Return why this address can't be the node's; "" if it can."""
    ip = address.ip if address else ""
    if wishes.pin and (not address or not wishes.allows(interface.name, ip)):
        is_meant = interface.name == wishes.pin
        return "has no address" if is_meant else f"not the pinned {wishes.pin}"
    if not (interface.is_up and interface.is_running):
        return "no carrier" if interface.is_up else "down"
    if address is None:
        return "has no address"
    if reason := _unroutable(address):
        return reason
    if len(nodes := owners[str(address.interface.ip)]) > 1:
        return f"the same address on {some(nodes)}"
    return "" if wishes.pin else _wrong_kind(interface, inventory)


def _unroutable(address: Address) -> str:
    ip = address.interface.ip
    for claim in ("loopback", "link_local", "multicast", "unspecified"):
        if getattr(ip, f"is_{claim}"):
            return f"{claim.replace('_', '-')} address"
    return ""


def _wrong_kind(interface: Interface, inventory: Inventory) -> str:
    if interface.master:
        return f"a port of {interface.master}"
    if interface.kind in KINDS:
        return ""
    if interface.kind != "veth":
        return f"a {interface.kind} interface: it need not lead off the node"
    if interface.peer:
        return f"both ends are on this node (the other is {interface.peer})"
    if CONTAINER_NAMES.match(interface.name):
        return "by its name a container's cable"
    others = [one.name for one in inventory.interfaces if _leads_off(one)]
    return f"a veth, and {others[0]} leads off the node" if others else ""


def _leads_off(interface: Interface) -> bool:
    is_on = interface.is_up and interface.is_running and not interface.master
    addresses = [one for one in interface.addresses if not _unroutable(one)]
    return is_on and interface.kind in KINDS and bool(addresses)


def group(
    links: Iterable[Link], nodes: Sequence[str], wishes: Wishes
) -> tuple[list[Choice], list[str]]:
    """Return the choices on all nodes, best first, and why other subnets are none."""
    links = list(links)
    names = Counter(name for name, _ in {(one.interface, one.node) for one in links})
    subnets: dict[str, list[Link]] = defaultdict(list)
    routes: dict[str, list[Link]] = defaultdict(list)
    for one in links:
        subnets[str(one.network)].append(one)
        base = wishes.pin if wishes.network else one.interface
        routes[f"{base} IPv{one.version}{ROUTED}"].append(one)
    choices, incomplete = [], []
    for label, members in subnets.items():
        present = {one.node for one in members}
        if absent := [node for node in nodes if node not in present]:
            there = [f"{one.interface} of {one.node}" for one in members]
            incomplete.append(f"{label}: only {some(there)}; not on {some(absent)}")
        else:
            choices.append(choice_of(label, members, names, wishes))
    for label, members in routes.items():
        is_whole = {one.node for one in members} == set(nodes)
        if is_whole and len({one.network for one in members}) > 1:
            chosen = choice_of(label, members, names, wishes)
            if len({one.network for one in chosen.links.values()}) > 1:
                choices.append(chosen)
    return sorted(choices, key=lambda one: merit(one, wishes)), incomplete


def choice_of(
    label: str, members: Iterable[Link], names: Mapping[str, int], wishes: Wishes
) -> Choice:
    """Take one link of each node, the same name on all of them if one name serves."""

    def key(link: Link) -> tuple[object, ...]:
        dear = (wishes.rank(link.interface), -link.speed_mbps, not link.rdma)
        return (*dear, -names[link.interface], natural(link.interface), _int(link.ip))

    by_node: dict[str, list[Link]] = defaultdict(list)
    for one in sorted(members, key=key):
        by_node[one.node].append(one)
    links = {node: found[0] for node, found in by_node.items()}
    return Choice(label=label, links=links, warnings=tuple(warnings(label, by_node)))


MERITS = ("hint", "speed", "equal MTU", "RDMA", "one subnet", "IPv4", "name", "name")


def merit(choice: Choice, wishes: Wishes) -> tuple[object, ...]:
    """Return the sort key of a choice, by MERITS, the smallest the best. The worst link counts."""
    links = choice.links.values()
    return (
        max(wishes.rank(one.interface) for one in links),
        -min(one.speed_mbps for one in links),
        len({one.mtu for one in links}) > 1,
        not all(one.rdma for one in links),
        choice.is_routed,
        max(one.version for one in links),
        min(natural(one.interface) for one in links),
        choice.label,
    )


def why(choice: Choice, later: Sequence[Choice], wishes: Wishes) -> str:
    """Return what put a choice before the next one of `later`."""
    pinned = f"interface_pin={wishes.pin}; " if wishes.pin else ""
    if not later:
        return f"{pinned}no other network has all nodes"
    pairs = zip(MERITS, merit(choice, wishes), merit(later[0], wishes), strict=True)
    differing = next(name for name, ours, theirs in pairs if ours != theirs)
    return f"{pinned}before {later[0].label} by {differing}"


def warnings(label: str, by_node: Mapping[str, Sequence[Link]]) -> Iterable[str]:
    """Yield what a person should know of a choice that works."""
    firsts = [found[0] for found in by_node.values()]
    yield from _difference(f"{label}: MTU", {one.node: one.mtu for one in firsts})
    yield from _difference(f"{label}: speed in Mb/s", {one.node: one.speed_mbps for one in firsts})
    for node, found in by_node.items():
        names = list(dict.fromkeys(one.interface for one in found))
        if len(names) > 1 and not label.endswith(ROUTED):
            yield f"{label}: {node} has {', '.join(names)} in it; the kernel picks the way out"
        twice = [one for one in found if one.interface == names[0]]
        if len(twice) > 1:
            yield f"{label}: {names[0]} of {node} has {len(twice)} addresses; NCCL takes the first"


def _difference(what: str, by_node: Mapping[str, int]) -> Iterable[str]:
    if len(set(by_node.values())) > 1:
        told = [f"{node} {value}" for node, value in by_node.items()]
        yield f"{what} differs: {some(told)}"


def cautions(
    choice: Choice, inventories: Mapping[str, Inventory], wishes: Wishes
) -> tuple[str, ...]:
    """Return the choice's warnings, and what else of these nodes a person would not expect."""
    ports = {one.node: len(one.active_rdma) for one in inventories.values()}
    found = [*choice.warnings, *_difference("number of ACTIVE RDMA ports", ports)]
    names = sorted({one.interface for one in choice.links.values()}, key=natural)
    if wishes.hints and any(wishes.rank(name) == len(wishes.hints) for name in names):
        asked = f"interface_hints={', '.join(wishes.hints)}"
        found.append(f"{asked}: no network of all nodes has such names; took {', '.join(names)}")
    return tuple(found)


def _missing_pin(machines: Mapping[str, Inventory], wishes: Wishes) -> list[str]:
    """Return where a pinned name, or an address in a pinned network, isn't."""
    if not wishes.pin:
        return []
    reasons = []
    for node, inventory in machines.items():
        has = [
            one.name
            for one in inventory.interfaces
            if (one.name == wishes.pin and wishes.network is None)
            or (wishes.network and any(wishes.allows(one.name, at.ip) for at in one.addresses))
        ]
        if not has:
            there = ", ".join(one.name for one in inventory.interfaces) or "none"
            reasons.append(f"{wishes.pin}: not on {node}, which has {there}")
    return reasons


def _loopback(inventory: Inventory) -> list[Choice]:
    """One node without a network still talks to itself."""
    for interface in inventory.interfaces:
        for address in interface.addresses:
            if interface.kind == "loopback" and interface.is_up:
                link = link_of(inventory.node, interface, address)
                return [Choice(label=str(link.network), links={inventory.node: link})]
    return []


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which eth2 comes before eth10."""
    pieces = re.findall(r"\d+|\D+", name)
    return tuple((0, int(one), "") if one.isdigit() else (1, 0, one) for one in pieces)


def some(names: Sequence[str]) -> str:
    """Name the first few, and how many more there are: a thousand nodes fill no message."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def link_of(node: str, interface: Interface, address: Address) -> Link:
    return Link(
        node=node,
        interface=interface.name,
        ip=str(address.interface.ip),
        prefix=address.prefix,
        mtu=interface.mtu,
        speed_mbps=interface.speed_mbps,
        rdma=interface.rdma,
    )


def _name(interface: Interface, address: Address | None) -> str:
    """Name what is refused; a link-local address is each interface's own and only noise."""
    if address is None or address.interface.ip.is_link_local:
        return interface.name
    return f"{interface.name} {address.ip}/{address.prefix}"


def _int(ip: str) -> int:
    return int(ipaddress.ip_address(ip))
