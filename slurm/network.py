"""Which interface each node uses, decided from inventories alone: pure, and refused, not guessed.

An address counts only if no other node has it too: that one rule keeps out docker0, every
`br-<hash>` and 127.0.1.1 of a hosts file. What is left is grouped by subnet, and a subnet on all
nodes wins by: hint > speed > equal MTU > RDMA behind it > name. Interfaces of one name in
different subnets count as routed, and only once a connection has been proved (slurm.proof).
NCCL_IB_GID_INDEX and NCCL_IB_HCA are never set: GID indices drift between boots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from agentrl.errors import NetworkError
from slurm.inventory import Inventory
from slurm.network_rank import Choice, Link, Wishes, cautions, link_of, rank, some, why

NAME = "network.json"
"""Of the plan, in a launch attempt's folder; slurm.proof writes it."""


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    interface: str
    address: str
    environment: dict[str, str]
    """NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, MASTER_ADDR; for the roles of this node."""
    rdma: tuple[str, ...] = ()
    """All ACTIVE ports of the node, as `mlx5_0:1`: NCCL chooses among them itself."""


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What network.json holds."""

    subnet: str
    trainer: str
    """The node whose address MASTER_ADDR is."""
    nodes: dict[str, NodePlan]
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """Every other interface and subnet, with the reason."""
    why: str = ""
    """What put it before the other choices."""
    proof: str = ""
    """What was proved of it; empty for a plan that rests on inventories alone."""


def read(folder: Path) -> NetworkPlan:
    """Return the plan of an attempt. Raises OSError, or NetworkError if it is torn."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=NetworkPlan)
    except msgspec.DecodeError as error:
        raise NetworkError(f"{folder / NAME}: not a network plan: {error}") from error


def plan(
    inventories: Mapping[str, Inventory],
    *,
    pin: str = "",
    hints: Sequence[str] = (),
    reach: Mapping[str, str] | None = None,
    trainer: str = "",
) -> NetworkPlan:
    """Return the network of these nodes; `inventories` is by Slurm's node name.

    reach: by a choice's label, "" where mutual reach was proved, else why it failed; None if
    nothing has been tried, and then a routed choice is not taken. trainer: the node of
    MASTER_ADDR; the first of `inventories` if left out. Raises NetworkError with each candidate
    and the reason that it was refused.
    """
    wishes = Wishes(pin=pin, hints=tuple(hints))
    ranking = rank(inventories, wishes)
    refused = list(ranking.refused)
    for choice in ranking.choices:
        reason = refusal(choice, reach)
        if not reason:
            later = ranking.choices[ranking.choices.index(choice) + 1 :]
            rest = [f"{one.label}: ranked after {choice.label}" for one in later]
            made = describe(choice, inventories, trainer=trainer, refused=(*refused, *rest))
            return msgspec.structs.replace(
                made,
                warnings=cautions(choice, inventories, wishes),
                why=why(choice, later, wishes),
            )
        refused.append(f"{choice.label}: {reason}")
    raise NetworkError(told(inventories, wishes, refused))


def refusal(choice: Choice, reach: Mapping[str, str] | None) -> str:
    """Return why `choice` can't be taken after what was tried; "" if it can."""
    if reach is None or choice.label not in reach:
        alone = len(choice.links) < 2
        unproved = reach is not None or choice.is_routed
        return "mutual reach is not proved" if unproved and not alone else ""
    return reach[choice.label]


def told(inventories: Mapping[str, Inventory], wishes: Wishes, refused: Iterable[str]) -> str:
    """Return the message of a refusal: asked, found, to do."""
    asked = f"interface_pin={wishes.pin!r}" if wishes.pin else "a network of all nodes"
    lines = [f"{asked}: none fits {some(list(inventories))}"]
    lines += [f"  {reason}" for reason in dict.fromkeys(refused)] or ["  no node has an interface"]
    lines += ["name an interface with cluster.interface_pin=NAME, or exclude the node that differs"]
    return "\n".join(lines)


def describe(
    choice: Choice,
    inventories: Mapping[str, Inventory],
    *,
    trainer: str = "",
    refused: tuple[str, ...] = (),
    proof: str = "",
) -> NetworkPlan:
    """Return each node's part of a choice."""
    machines = {one.node: one for one in inventories.values()}
    trainer = trainer or next(iter(machines))
    if trainer not in machines:
        raise NetworkError(
            f"trainer={trainer!r}: no inventory of it; there: {some(list(machines))}"
        )
    nodes = {
        node: NodePlan(
            interface=link.interface,
            address=link.ip,
            environment=environment(link, machines[node], choice.links[trainer].ip),
            rdma=machines[node].active_rdma,
        )
        for node, link in choice.links.items()
    }
    return NetworkPlan(
        subnet=choice.label,
        trainer=trainer,
        nodes=nodes,
        warnings=choice.warnings,
        refused=refused,
        proof=proof,
    )


def environment(link: Link, inventory: Inventory, master: str) -> dict[str, str]:
    """Return the variables of one node.

    NCCL reads a name as a prefix (eth1 is eth10 too) unless it begins with `=`, which not every
    build honours: so only where it is needed. Gloo takes the piece as it is. NCCL would take an
    interface's IPv4 address first, so an IPv6 choice says its family.
    """
    name = link.interface
    others = [one.name for one in inventory.interfaces if one.name != name]
    is_prefix = any(one.startswith(name) for one in others)
    values = {
        "NCCL_SOCKET_IFNAME": f"={name}" if is_prefix else name,
        "GLOO_SOCKET_IFNAME": name,
        "MASTER_ADDR": master,
    }
    return values | ({"NCCL_SOCKET_FAMILY": "AF_INET6"} if link.version == 6 else {})


def forced(inventories: Mapping[str, Inventory], interface: str) -> Choice:
    """Return `interface` on every node, unchecked: for a test of what the picker is good for."""
    links = {}
    for inventory in inventories.values():
        found = [one for one in inventory.interfaces if one.name == interface and one.addresses]
        if not found:
            raise NetworkError(f"interface {interface!r}: none with an address on {inventory.node}")
        links[inventory.node] = link_of(inventory.node, found[0], found[0].addresses[0])
    return Choice(label=f"{interface} (unchecked)", links=links)
