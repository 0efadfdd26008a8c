"""Nodes that prove their network to each other, over real network namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import NetworkError
from slurm.challenge import Answer, Party, ask, listening
from slurm.files import publish
from slurm.inventory import Inventory
from slurm.network_rank import Wishes
from slurm.proof import Meeting, make_key, pairs, prove, read, read_key, slurm_round

NODES = ("n0", "n1", "n2")
SPEC = {"folder": Path(), "trainer": "n0", "round": "0", "wishes": Wishes()}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Net:
    """Namespaces on one bridge: eth0 10.9.0.N, eth1 10.8.0.N, docker0 alike on each."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.made: list[str] = []
        self.switch = self.add("sw")
        self.add_bridge(self.switch, "br0")

    def add(self, node: str) -> str:
        name = f"p{self.tag}-{node}"
        ip("netns", "add", name)
        self.made.append(name)
        return name

    def add_bridge(self, space: str, name: str, *addresses: str) -> None:
        ip("-n", space, "link", "add", name, "type", "bridge")
        for address in addresses:
            ip("-n", space, "addr", "add", address, "dev", name)
        ip("-n", space, "link", "set", name, "up")

    def boot(self, node: str, number: int) -> None:
        space = self.add(node)
        ip("-n", space, "link", "set", "lo", "up")
        self.add_bridge(space, "docker0", "172.17.0.1/16")
        for at, subnet in enumerate(("10.9.0", "10.8.0")):
            cable = f"{node}-{at}"
            cable_to = ["type", "veth", "peer", "name", f"eth{at}", "netns", space]
            ip("-n", self.switch, "link", "add", cable, *cable_to)
            ip("-n", self.switch, "link", "set", cable, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{subnet}.{number}/24", "dev", f"eth{at}")
            ip("-n", space, "link", "set", f"eth{at}", "up")

    def settle(self, *, limit_s: float = 60) -> None:
        """Wait for the links: until the kernel says "up", up to a second late, packets are lost."""
        end = time.monotonic() + limit_s
        while waiting := [name for name in self.made for _ in self.unsettled(name)]:
            assert time.monotonic() < end, f"links of {waiting} are not up"
            os.sched_yield()

    def unsettled(self, space: str) -> list[str]:
        links = ["ip", "-n", space, "-j", "link", "show", "type", "veth"]
        shown = json.loads(subprocess.run(links, check=True, capture_output=True).stdout)
        return [link["ifname"] for link in shown if link["operstate"] != "UP"]

    def space(self, node: str) -> str:
        return f"p{self.tag}-{node}"

    def lose(self, node: str, address: str, *, device: str = "eth0") -> None:
        """Have `node` send what is for `address` to nobody, as a firewall that drops does."""
        nobody = ["lladdr", "02:00:00:00:00:99", "dev", device, "nud", "permanent"]
        ip("-n", self.space(node), "neigh", "replace", address, *nobody)

    def redirect(self, node: str, address: str, *, to: str) -> None:
        """Give `to` an address that is another's, and have `node` believe it, as stale ARP does."""
        ip("-n", self.space(to), "addr", "add", f"{address}/32", "dev", "eth0")
        show = ["ip", "-n", self.space(to), "-j", "link", "show", "eth0"]
        mac = json.loads(subprocess.run(show, check=True, capture_output=True).stdout)[0]["address"]
        there = ["lladdr", mac, "dev", "eth0", "nud", "permanent"]
        ip("-n", self.space(node), "neigh", "replace", address, *there)

    def python(self, node: str, program: str, *words: str) -> subprocess.Popen[str]:
        enter = ["ip", "netns", "exec", self.space(node), sys.executable, "-c", program]
        pipe = subprocess.PIPE
        return subprocess.Popen([*enter, *words], stdin=pipe, stdout=pipe, text=True)

    def start(self, node: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
        enter = ["ip", "netns", "exec", self.space(node)]
        step = [sys.executable, "-m", "slurm.proof", str(folder), "--nodes", ",".join(NODES)]
        return subprocess.Popen(
            [*enter, *step, "--connect", "6", *flags],
            env={**os.environ, "SLURMD_NODENAME": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def prove(self, folder: Path, *flags: str) -> tuple[list[int], list[str]]:
        """Run the step on all nodes; return codes and what was said on stderr."""
        with_nodes = [self.start(node, folder, *flags) for node in NODES]
        said = [process.communicate(timeout=240)[1] for process in with_nodes]
        return [process.returncode for process in with_nodes], said

    def end(self) -> None:
        for name in self.made:
            ip("netns", "del", name)


@pytest.fixture
def net() -> Iterator[Net]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = Net()
    try:
        for at, node in enumerate(NODES, start=1):
            made.boot(node, at)
        made.settle()
        yield made
    finally:
        made.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "it's an attempt"
    made.mkdir()
    return made


# Over namespaces


@pytest.mark.slow
def test_healthy_nodes_agree_and_never_on_docker0(net: Net, folder: Path) -> None:
    codes, said = net.prove(folder)
    assert (codes, said) == ([0, 0, 0], ["", "", ""])
    made = read(folder)
    assert {one.interface for one in made.nodes.values()} == {"eth0"}
    assert made.nodes["n2"].environment["MASTER_ADDR"] == "10.9.0.1"
    assert made.proof.startswith("6 ordered pairs answered")


@pytest.mark.slow
def test_a_subnet_that_drops_packets_gives_way_to_the_next(net: Net, folder: Path) -> None:
    net.lose("n1", "10.9.0.3")
    assert net.prove(folder)[0] == [0, 0, 0]
    made = read(folder)
    assert made.subnet == "10.8.0.0/24"
    told = "n1 (10.9.0.2) asked n2 at 10.9.0.3"
    assert any(told in one and "no answer within 6 s" in one for one in made.refused)


@pytest.mark.slow
def test_a_firewalled_node_is_named_by_every_node(net: Net, folder: Path) -> None:
    net.lose("n1", "10.9.0.3")
    net.lose("n0", "10.8.0.3", device="eth1")
    codes, said = net.prove(folder)
    assert codes == [1, 1, 1]
    for one in said:
        assert "n1 (10.9.0.2) asked n2 at 10.9.0.3" in one
        assert "n0 (10.8.0.1) asked n2 at 10.8.0.3" in one


@pytest.mark.slow
def test_with_the_picker_off_docker0_is_refused_by_the_proof(net: Net, folder: Path) -> None:
    codes, said = net.prove(folder, "--unchecked", "docker0")
    assert codes == [1, 1, 1]
    assert "docker0, unchecked: n0 (172.17.0.1) asked n1 at 172.17.0.1" in said[0]
    assert not (folder / "network.json").exists()


@pytest.mark.slow
def test_pins_that_are_duplicated_or_nowhere_are_refused(net: Net, folder: Path) -> None:
    codes, said = net.prove(folder, "--pin", "docker0")
    assert codes == [1, 1, 1]
    assert "the same address on n0, n1, n2" in said[1]
    codes, said = net.prove(folder, "--pin", "hsn0", "--round", "second")
    assert codes == [1, 1, 1]
    assert "hsn0: not on n2, which has docker0, eth0, eth1, lo" in said[0]


@pytest.mark.slow
def test_a_missing_node_is_named_at_the_limit(net: Net, folder: Path) -> None:
    processes = [net.start(node, folder, "--limit", "30") for node in ("n0", "n2")]
    said = [one.communicate(timeout=240)[1] for one in processes]
    assert "missing: n1; there: n0, n2" in said[0] + said[1]
    assert [one.returncode for one in processes] == [1, 1]


@pytest.mark.slow
def test_two_tasks_of_one_node_are_one_participant(net: Net, folder: Path) -> None:
    processes = [net.start(node, folder) for node in (*NODES, "n0")]
    assert [one.wait(240) for one in processes] == [0, 0, 0, 0]
    for one in processes:
        one.communicate()


@pytest.mark.slow
def test_a_second_round_does_not_join_the_files_of_the_first(net: Net, folder: Path) -> None:
    assert net.prove(folder, "--round", "1")[0] == [0, 0, 0]
    process = net.start("n0", folder, "--round", "2", "--limit", "1")
    assert "missing: n1, n2" in process.communicate(timeout=240)[1]


ANSWER = """
import asyncio, sys
from slurm.challenge import Party, listening

async def main():
    async with listening(Party(node=sys.argv[1], round="0", key=b"k" * 32), sys.argv[2]) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
ASK = """
import asyncio, sys
from slurm.challenge import Party, ask

party = Party(node=sys.argv[1], round="0", key=b"k" * 32)
at = (sys.argv[3], int(sys.argv[4]))
print(asyncio.run(ask(party, sys.argv[2], at, source=sys.argv[5], limit_s=30)))
"""


@pytest.mark.slow
def test_a_node_that_has_taken_anothers_address_is_found_out(net: Net) -> None:
    net.redirect("n0", "10.9.0.2", to="n2")
    with net.python("n2", ANSWER, "n2", "10.9.0.2") as liar:
        assert liar.stdout is not None
        port = liar.stdout.readline().strip()
        asker = net.python("n0", ASK, "n0", "n1", "10.9.0.2", port, "10.9.0.1")
        said = asker.communicate(timeout=240)[0].strip()
        liar.communicate(timeout=240)
    assert said == f"n0 (10.9.0.1) asked n1 at 10.9.0.2 port {port}: n2 answered in its place"


# One connection


def party(node: str, key: bytes = b"k" * 32) -> Party:
    return Party(node=node, round="0", key=key)


def asked(answerer: Party, asker: Party, meant: str, limit_s: float = 30.0) -> str:
    async def both() -> str:
        async with listening(answerer, "127.0.0.1") as port:
            at = ("127.0.0.1", port)
            return await ask(asker, meant, at, source="127.0.0.1", limit_s=limit_s)

    return asyncio.run(both())


def test_the_node_that_was_meant_is_proved() -> None:
    assert asked(party("b"), party("a"), "b") == ""


def test_ipv6_serves_as_well() -> None:
    async def go() -> str:
        async with listening(party("b"), "::1") as port:
            return await ask(party("a"), "b", ("::1", port), source="::1", limit_s=30)

    assert asyncio.run(go()) == ""


def test_another_node_at_that_address_is_named() -> None:
    assert "asked b at 127.0.0.1" in asked(party("c"), party("a"), "b")
    assert asked(party("c"), party("a"), "b").endswith(": c answered in its place")


def test_a_stranger_that_gives_the_right_name_has_not_the_key() -> None:
    said = asked(party("b", key=b"guess"), party("a"), "b")
    assert "without this job's key, which calls itself 'b'" in said


def test_an_answer_of_another_round_is_no_answer() -> None:
    other = Party(node="b", round="1", key=b"k" * 32)
    assert "without this job's key" in asked(other, party("a"), "b")


async def _told_by(reply: bytes) -> str:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        at = server.sockets[0].getsockname()[:2]
        return await ask(party("a"), "b", at, source="127.0.0.1", limit_s=30)


def test_the_askers_own_words_sent_back_prove_nothing() -> None:
    replayed = Answer(node="b", nonce="0" * 32, seen="127.0.0.1", mac="0" * 64)
    said = asyncio.run(_told_by(msgspec.json.encode(replayed) + b"\n"))
    assert "without this job's key" in said


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n", b"", b"x" * 9000 + b"\n"])
def test_another_service_at_that_port_is_no_answer(reply: bytes) -> None:
    assert "it answered in no such protocol" in asyncio.run(_told_by(reply))


def test_a_closed_port_is_told_in_the_kernels_words() -> None:
    async def go() -> str:
        async with listening(party("b"), "127.0.0.1") as port:
            pass
        return await ask(party("a"), "b", ("127.0.0.1", port), source="127.0.0.1", limit_s=30)

    assert "refused" in asyncio.run(go()).lower()


# Parts


def test_under_32_nodes_every_ordered_pair_is_proved() -> None:
    assert len(pairs([f"n{at}" for at in range(31)], "n0")) == 31 * 30


def test_from_32_nodes_on_a_ring_and_a_star_both_ways() -> None:
    nodes = [f"n{at}" for at in range(100)]
    made = pairs(nodes, "n7")
    assert made == {(other, one) for one, other in made}
    assert {node for asker, node in made if asker == "n7"} == set(nodes) - {"n7"}
    assert len(made) < 4 * len(nodes)


def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert len(read_key(tmp_path / "key")) == 32
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(NetworkError, match="mode 640 lets others read it"):
        read_key(tmp_path / "key")


def test_a_round_is_named_by_slurms_job_restart_and_step() -> None:
    assert slurm_round({}) == "0"
    assert slurm_round({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}) == "7-0-3"


def test_one_node_has_nothing_to_prove(folder: Path) -> None:
    meeting = Meeting(**{**SPEC, "folder": folder, "nodes": ("n0",)})  # type: ignore[arg-type]
    meeting.room.mkdir(parents=True)
    made = json.loads('{"node":"n0","interfaces":[{"name":"lo","kind":"loopback"}]}')
    lo = {"ip": "127.0.0.1", "prefix": 8}
    made["interfaces"][0]["addresses"] = [lo]
    plan = prove(meeting, msgspec.convert(made, Inventory))
    assert (plan.nodes["n0"].address, plan.proof) == ("127.0.0.1", "")
    assert read(folder) == plan


def test_a_torn_plan_is_told(folder: Path) -> None:
    publish(folder / "network.json", b'{"subnet":')
    with pytest.raises(NetworkError, match="not a network plan"):
        read(folder)


@pytest.mark.parametrize(
    ("facts", "said"),
    [({"nodes": ()}, "at least one"), ({"nodes": ("n1",)}, "trainer='n0': not of nodes n1")],
)
def test_a_meeting_of_nobody_or_without_its_trainer_is_refused(
    facts: dict[str, object], said: str
) -> None:
    with pytest.raises(NetworkError, match=said):
        Meeting(**{**SPEC, **facts})  # type: ignore[arg-type]
