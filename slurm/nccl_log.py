"""What NCCL or RCCL says that it uses (NCCL_DEBUG=INFO), against the plan.

NCCL looks for interfaces itself. A build that does not honour `=name`, or a plugin that did not
load, ends on another network without an error; its log is the only witness.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm.network import NodePlan

ADDRESS = r"(?P<interface>[^\s\[\]:]+):(?P<address>\S+?)<\d+>"
BOOTSTRAP = re.compile(rf"NCCL INFO Bootstrap ?: Using (?:\[0\])?{ADDRESS}")
"""`Bootstrap : Using [0]eth0:…` in 2.4, without the number since, without the space of late."""
OUT_OF_BAND = re.compile(rf"NCCL INFO NET/IB ?: Using .*; ?OOB {ADDRESS}")
SOCKETS = re.compile(r"NCCL INFO NET/Socket ?: Using (?P<list>.*)")
SOCKET = re.compile(rf"\[\d+\]{ADDRESS}")
TRANSPORT = re.compile(r"NCCL INFO (?:Using network |Initialized NET plugin )(?P<name>.+)")
NO_DEVICE = re.compile(r"NCCL INFO NET/IB ?: No device found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """One statement of the log."""

    what: str
    """`bootstrap`, `out of band`, `socket`, `transport`, `no RDMA device`."""
    interface: str = ""
    address: str = ""
    name: str = ""
    """Of a transport: `IB`, `Socket`, `AWS Libfabric`."""


def parse(lines: Iterable[str]) -> Iterator[Used]:
    """Yield what the log says of networks; other lines are passed over."""
    for line in lines:
        for what, pattern in (("bootstrap", BOOTSTRAP), ("out of band", OUT_OF_BAND)):
            if match := pattern.search(line):
                yield _used(what, match)
        if match := SOCKETS.search(line):
            yield from (_used("socket", one) for one in SOCKET.finditer(match["list"]))
        if match := TRANSPORT.search(line):
            yield Used(what="transport", name=match["name"].strip())
        if NO_DEVICE.search(line):
            yield Used(what="no RDMA device")


def _used(what: str, match: re.Match[str]) -> Used:
    address = match["address"].partition("%")[0]
    return Used(what=what, interface=match["interface"], address=address)


def differences(lines: Iterable[str], planned: NodePlan) -> list[str]:
    """Return where one node's log departs from its plan, each once; none is what one hopes.

    A log without any such line gives none: NCCL was not asked for INFO, or not used.
    """
    found = [_difference(used, planned) for used in parse(lines)]
    return list(dict.fromkeys(one for one in found if one))


def _difference(used: Used, planned: NodePlan) -> str:
    if used.what == "transport":
        if used.name != "Socket" or not planned.rdma:
            return ""
        return f"NCCL fell back to TCP sockets, though {', '.join(planned.rdma)} is ACTIVE"
    if used.what == "no RDMA device":
        if not planned.rdma:
            return ""
        return f"NCCL found no RDMA device, though {', '.join(planned.rdma)} is ACTIVE"
    if (used.interface, used.address) == (planned.interface, planned.address):
        return ""
    return (
        f"NCCL's {used.what} uses {used.interface} {used.address}, "
        f"not {planned.interface} {planned.address} as planned"
    )
