"""Agree on the network of one launch attempt and prove it: one srun step over all its nodes.

    srun --het-group=0,1 -n… python -m slurm.proof FOLDER --nodes trn0,inf0,inf1

FOLDER is the attempt's; the nodes meet in FOLDER/network/ROUND by files alone:

    NODE.inventory.json → every node ranks the same choices (slurm.network)
    NODE.ports.json     → each listens on its address of every choice
    NODE.reach-K.json   → choice K asked over each ordered pair, from the chosen address
    verdict-K.json      → the trainer's word; if it failed, all go on to choice K+1
    ../../network.json  → the plan; or refused.json, and every task exits 1

Exit codes: 0 proved, 1 refused, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import NetworkError
from slurm.challenge import Party, ask, listening
from slurm.files import listed, publish
from slurm.inventory import Inventory, take
from slurm.network import NAME, NetworkPlan, describe, forced, plan, read
from slurm.network_rank import Choice, Wishes, rank

FULL_MESH_NODES = 32
"""From here on a ring and a star around the trainer, not every pair."""
MAX_CHOICES = 6
KEY, REFUSED, DONE = "key", "refused.json", "done.json"
Found = TypeVar("Found")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's word on one choice."""

    label: str
    failures: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What every node of the step is told alike."""

    folder: Path
    """The launch attempt's."""
    nodes: tuple[str, ...]
    trainer: str
    round: str
    """Names this meeting: files of an earlier one in the same attempt are not joined."""
    wishes: Wishes
    limit_s: float = 60.0
    connect_s: float = 8.0
    """For one connection; a busy node is slow, while a closed port is told at once."""
    unchecked: str = ""
    """Take this interface without the picker's checks; only the proof stands."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise NetworkError(f"nodes={','.join(self.nodes)!r}: must be different, at least one")
        if self.trainer not in self.nodes:
            raise NetworkError(f"trainer={self.trainer!r}: not of nodes {', '.join(self.nodes)}")

    @property
    def room(self) -> Path:
        return self.folder / "network" / self.round


def pairs(nodes: Sequence[str], trainer: str) -> set[tuple[str, str]]:
    """Return the ordered (asker, answerer) pairs that prove mutual reach."""
    if len(nodes) < FULL_MESH_NODES:
        return {(one, other) for one in nodes for other in nodes if one != other}
    ring = [(one, nodes[(at + 1) % len(nodes)]) for at, one in enumerate(nodes)]
    star = [(trainer, node) for node in nodes if node != trainer]
    both = [*ring, *star]
    return {*both, *((other, one) for one, other in both)}


def prove(meeting: Meeting, inventory: Inventory) -> NetworkPlan:
    """Take part as `inventory.node` until the plan is proved; the trainer writes it.

    Raises NetworkError: no choice was proved, or someone was missing at the limit. Whatever
    goes wrong on one node is told to the others, who then do not wait for it.
    """
    try:
        return asyncio.run(_Participant(meeting, inventory).take_part())
    except Exception as error:
        if not listed(meeting.room / REFUSED):
            note = Refused(node=inventory.node, message=str(error))
            publish(meeting.room / REFUSED, msgspec.json.encode(note))
        raise


class _Participant:
    """One node's part: what it waits for, and until when."""

    def __init__(self, meeting: Meeting, inventory: Inventory) -> None:
        self.meeting, self.inventory, self.node = meeting, inventory, inventory.node
        self.end = time.monotonic() + meeting.limit_s
        self.began = time.monotonic()
        if self.node not in meeting.nodes:
            raise NetworkError(f"node {self.node}: not one of {', '.join(meeting.nodes)}")

    async def take_part(self) -> NetworkPlan:
        self.say("inventory", self.inventory)
        if self.node == self.meeting.trainer:
            make_key(self.meeting.room / KEY)
        inventories = await self.hear("inventory", Inventory)
        choices = self.choices(inventories)
        await self.wait(lambda names: [KEY] if KEY not in names else [], "the key")
        key = read_key(self.meeting.room / KEY)
        party = Party(node=self.node, round=self.meeting.round, key=key)
        async with AsyncExitStack() as stack:
            own = []
            for choice in choices:
                own.append(await self.listen(stack, party, choice.links[self.node].ip))
            self.say("ports", own)
            ports = await self.hear("ports", list[int | str])
            return await self.try_all(choices, inventories, party, ports)

    def choices(self, inventories: Mapping[str, Inventory]) -> tuple[Choice, ...]:
        if self.meeting.unchecked:
            return (forced(inventories, self.meeting.unchecked),)
        found = rank(inventories, self.meeting.wishes).choices[:MAX_CHOICES]
        if not found:
            self.plan(inventories, {})  # raises, with every candidate and its reason
        return found

    def plan(self, inventories: Mapping[str, Inventory], reach: Mapping[str, str]) -> NetworkPlan:
        wishes = self.meeting.wishes
        return plan(
            inventories,
            pin=wishes.pin,
            hints=wishes.hints,
            reach=reach,
            trainer=self.meeting.trainer,
        )

    async def listen(self, stack: AsyncExitStack, party: Party, address: str) -> int | str:
        """Return the port, or the kernel's word why this address can't be listened on."""
        try:
            return await stack.enter_async_context(listening(party, address))
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)

    async def try_all(
        self,
        choices: Sequence[Choice],
        inventories: Mapping[str, Inventory],
        party: Party,
        ports: Mapping[str, list[int | str]],
    ) -> NetworkPlan:
        reach: dict[str, str] = {}
        for at, choice in enumerate(choices):
            asked = await self.ask_all(choice, party, {node: ports[node][at] for node in ports})
            self.say(f"reach-{at}", asked)
            verdict = await self.verdict(at, choice.label)
            reach[choice.label] = "; ".join(verdict.failures)
            if not verdict.failures:
                return await self.agree(choice, inventories, reach)
        if self.meeting.unchecked:
            raise NetworkError(f"{self.meeting.unchecked}, unchecked: {'; '.join(reach.values())}")
        return self.plan(inventories, reach)  # raises

    async def ask_all(
        self, choice: Choice, party: Party, ports: Mapping[str, int | str]
    ) -> list[str]:
        """Return what went wrong when this node asked its peers over `choice`."""
        source = choice.links[self.node].ip
        every = sorted(pairs(self.meeting.nodes, self.meeting.trainer))
        asked = [
            self.ask_one(party, peer, (choice.links[peer].ip, ports[peer]), source)
            for asker, peer in every
            if asker == self.node
        ]
        return [reason for reason in await asyncio.gather(*asked) if reason]

    async def ask_one(self, party: Party, peer: str, at: tuple[str, int | str], source: str) -> str:
        address, port = at
        if isinstance(port, str):
            return f"{peer} can't listen on {address}: {port}"
        limit = self.meeting.connect_s
        return await ask(party, peer, (address, port), source=source, limit_s=limit)

    async def verdict(self, at: int, label: str) -> Verdict:
        name = f"verdict-{at}.json"
        if self.node == self.meeting.trainer:
            asked = await self.hear(f"reach-{at}", list[str])
            failures = tuple(dict.fromkeys(one for found in asked.values() for one in found))
            publish(
                self.meeting.room / name,
                msgspec.json.encode(Verdict(label=label, failures=failures)),
            )
        await self.wait(lambda names: [self.meeting.trainer] if name not in names else [], name)
        return msgspec.json.decode((self.meeting.room / name).read_bytes(), type=Verdict)

    async def agree(
        self, choice: Choice, inventories: Mapping[str, Inventory], reach: Mapping[str, str]
    ) -> NetworkPlan:
        trainer = self.meeting.trainer
        if self.meeting.unchecked:
            made = describe(choice, inventories, trainer=trainer)
        else:
            made = self.plan(inventories, reach)
        count, seconds = len(pairs(self.meeting.nodes, trainer)), time.monotonic() - self.began
        proof = f"{count} ordered pairs answered in {seconds:.2f} s" if count else ""
        made = msgspec.structs.replace(made, proof=proof)
        if self.node == trainer:
            data = msgspec.json.format(msgspec.json.encode(made), indent=1)
            publish(self.meeting.folder / NAME, data + b"\n")
            publish(self.meeting.room / DONE, b"{}")
        return made

    async def follow(self) -> NetworkPlan:
        """Wait for the outcome that another task of this node takes part in."""
        await self.wait(lambda names: [] if DONE in names else [self.meeting.trainer], DONE)
        return read(self.meeting.folder)

    # Files

    def say(self, what: str, value: object) -> None:
        publish(self.meeting.room / f"{self.node}.{what}.json", msgspec.json.encode(value))

    async def hear(self, what: str, kind: type[Found]) -> dict[str, Found]:
        """Return what every node said, in the order of the nodes."""
        nodes = self.meeting.nodes

        def missing(names: set[str]) -> list[str]:
            return [node for node in nodes if f"{node}.{what}.json" not in names]

        await self.wait(missing, what)
        room = self.meeting.room
        return {
            node: msgspec.json.decode((room / f"{node}.{what}.json").read_bytes(), type=kind)
            for node in nodes
        }

    async def wait(self, missing: Callable[[set[str]], list[str]], what: str) -> None:
        """Wait until nothing is missing, or someone has refused, or the limit is reached."""
        pause = 0.005
        while True:
            names = set(os.listdir(self.meeting.room))
            absent = missing(names)
            if not absent:
                return
            if REFUSED in names:
                note = msgspec.json.decode((self.meeting.room / REFUSED).read_bytes(), type=Refused)
                raise NetworkError(f"{note.node} refused: {note.message}")
            if time.monotonic() > self.end:
                there = [node for node in self.meeting.nodes if node not in absent]
                raise NetworkError(
                    f"{what}: waited {self.meeting.limit_s:g} s in {self.meeting.room}; missing: "
                    f"{', '.join(absent)}; there: {', '.join(there) or 'none'}; see the logs of "
                    "the missing"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.2)


def make_key(path: Path) -> None:
    """Write a random key that only its owner can read, whole or not at all."""
    publish(path, secrets.token_bytes(32), mode=0o600)


def read_key(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise NetworkError(f"key {path}: mode {mode:o} lets others read it; it must be 600")
    return path.read_bytes()


# Command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slurm.proof", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="the launch attempt's")
    parser.add_argument("--nodes", required=True, help="all nodes, comma-separated")
    parser.add_argument("--trainer", default="", help="the first of --nodes if left out")
    parser.add_argument("--pin", default="", help="interface or network, verified")
    parser.add_argument("--hint", action="append", default=[], help="glob, the dearest first")
    parser.add_argument("--round", default="", help="default: Slurm's job, restart and step")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--connect", type=float, default=8.0, help="seconds for one connection")
    parser.add_argument("--unchecked", default="", metavar="NAME", help="no picker, only the proof")
    args = parser.parse_args(argv)
    nodes = tuple(dict.fromkeys(args.nodes.split(",")))
    inventory = take()
    try:
        meeting = Meeting(
            folder=args.folder,
            nodes=nodes,
            trainer=args.trainer or nodes[0],
            round=args.round or slurm_round(os.environ),
            wishes=Wishes(pin=args.pin, hints=tuple(args.hint)),
            limit_s=args.limit,
            connect_s=args.connect,
            unchecked=args.unchecked,
        )
        made = run(meeting, inventory)
    except NetworkError as error:
        sys.stderr.write(f"{inventory.node}: network refused: {error}\n")
        return 1
    if inventory.node == meeting.trainer:
        sys.stdout.write(f"network {made.subnet}: {made.proof or 'one node'}\n")
        sys.stderr.writelines(f"warning: {one}\n" for one in made.warnings)
    return 0


def run(meeting: Meeting, inventory: Inventory) -> NetworkPlan:
    """Take part, or wait for the task of the same node that does: roles may share a node."""
    meeting.room.mkdir(parents=True, exist_ok=True)
    try:
        (meeting.room / f"{inventory.node}.claim").mkdir()
    except FileExistsError:
        return asyncio.run(_Participant(meeting, inventory).follow())
    return prove(meeting, inventory)


def slurm_round(environ: Mapping[str, str]) -> str:
    """Return what is the same in all tasks of one step and in no other; `0` outside Slurm."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    if names[0] not in environ:
        return "0"
    return "-".join(environ.get(name, "0") for name in names)


if __name__ == "__main__":
    sys.exit(main())
