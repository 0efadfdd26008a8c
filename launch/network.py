"""The network that was proved for a launch attempt: handed to its roles, told in the run's events,
and compared with what NCCL logs that it uses. On one machine there is no plan, and nothing to tell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import LaunchError
from agentrl.events import EventWriter, Network, now
from launch.run_dir import RunDir, launcher_of
from slurm import nccl_log
from slurm.files import listed
from slurm.network import NAME, NetworkPlan, NodePlan, read

READ_BYTES = 32 << 20
"""Of each log: NCCL names its interfaces when it starts."""


def plan_of(attempt: Path) -> NetworkPlan | None:
    """Return the attempt's plan, None where there is none."""
    return read(attempt) if listed(attempt / NAME) else None


def address_of_trainer(attempt: Path) -> str:
    """Return what was picked for it; loopback on one machine."""
    plan = plan_of(attempt)
    return plan.nodes[plan.trainer].address if plan else "127.0.0.1"


def environment_of(attempt: Path, host: str) -> dict[str, str]:
    """Return the variables that were proved for a node, such as MASTER_ADDR.

    Raises LaunchError if the plan has no such node: the role would run on a guess.
    """
    return _part_of(read(attempt), attempt, host).environment


def tell(events: EventWriter, attempt: Path, host: str) -> None:
    """Write what was picked for this node, why, and what proved it."""
    if plan := plan_of(attempt):
        events.write(event_of(plan, host, _part_of(plan, attempt, host)))


def compare(run: RunDir, number: int, role: str, node: int) -> list[str]:
    """Return where a role's logs depart from the plan; each is an event and a warning besides."""
    attempt = run.attempt(number)
    plan, host = plan_of(attempt), host_of(run, number, role, node)
    if plan is None or host not in plan.nodes:
        return []
    found = nccl_log.differences(_lines(attempt / "logs", role, node), plan.nodes[host])
    if found:
        events = EventWriter(run.path / "events", "launch", node="0")
        for problem in found:
            sys.stderr.write(f"warning: {role} on {host}: {problem}\n")
            events.write(event_of(plan, host, plan.nodes[host], problem=problem))
        events.close()
    return found


def host_of(run: RunDir, number: int, role: str, node: int) -> str:
    """Return Slurm's name of a role's node, empty where the attempt has none."""
    hosts = launcher_of(run, number).get("hosts")
    names = hosts.get(role, []) if isinstance(hosts, dict) else []
    return str(names[node]) if node < len(names) else ""


def event_of(plan: NetworkPlan, host: str, part: NodePlan, *, problem: str = "") -> Network:
    at = now()
    return Network(
        node=host,
        interface=part.interface,
        address=part.address,
        subnet=plan.subnet,
        why=plan.why,
        proof=plan.proof,
        problem=problem,
        start=at,
        end=at,
    )


def _part_of(plan: NetworkPlan, attempt: Path, host: str) -> NodePlan:
    if host not in plan.nodes:
        raise LaunchError(f"node {host!r}: not in {attempt / NAME}: {', '.join(plan.nodes)}")
    return plan.nodes[host]


def _lines(logs: Path, role: str, node: int) -> Iterator[str]:
    """Yield NCCL's lines of a role's own log and of its engines'."""
    own = [logs / f"{role}-{node}.{stream}" for stream in ("out", "err")]
    engines = logs / f"node-{node}"
    if role == "inference" and engines.is_dir():
        own += [engines / name for name in sorted(os.listdir(engines)) if name.endswith(".log")]
    for path in own:
        if listed(path):
            with path.open("rb") as file:
                whole = file.read(READ_BYTES)
            yield from (
                line.decode(errors="replace") for line in whole.splitlines() if b"NCCL INFO" in line
            )
