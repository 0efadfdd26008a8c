"""A launch attempt's network in the run's events: what was proved, and what NCCL did instead."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from agentrl.events import EventWriter, Network, read_folder
from launch import network
from launch.run_dir import RunDir, create
from slurm.network import NAME, NetworkPlan, NodePlan

HOSTS = {"trn0": "10.0.0.1", "inf0": "10.0.0.2", "inf1": "10.0.0.3"}
DOCKER = "inf1:9:9 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\n"


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    """A run with an attempt whose network is proved."""
    made = create(RunConfig(name="r", runs_dir=str(odd_path)), ["test"])
    attempt = made.attempt(1)
    (attempt / "logs" / "node-1").mkdir(parents=True)
    hosts = {"trainer": ["trn0"], "inference": ["inf0", "inf1"]}
    (attempt / "launcher.json").write_text(json.dumps({"hosts": hosts}))
    plan = NetworkPlan(
        subnet="10.0.0.0/24",
        trainer="trn0",
        why="no other network has all nodes",
        proof="6 ordered pairs answered in 0.10 s",
        nodes={
            host: NodePlan(interface="hsn0", address=ip, environment={"MASTER_ADDR": "10.0.0.1"})
            for host, ip in HOSTS.items()
        },
    )
    (attempt / NAME).write_bytes(msgspec.json.encode(plan))
    return made


def told(run: RunDir) -> list[Network]:
    return [one for one in read_folder(run.path / "events") if isinstance(one, Network)]


def test_a_role_begins_by_telling_its_network_why_it_was_taken_and_what_proved_it(
    run: RunDir,
) -> None:
    events = EventWriter(run.path / "events", "inference", node="1")
    network.tell(events, run.attempt(1), "inf1")
    [one] = told(run)
    assert (one.node, one.interface, one.address) == ("inf1", "hsn0", "10.0.0.3")
    assert (one.why, one.subnet) == ("no other network has all nodes", "10.0.0.0/24")
    assert (one.proof, one.problem) == ("6 ordered pairs answered in 0.10 s", "")


def test_a_role_gets_what_was_proved_for_its_node_and_no_guess(run: RunDir) -> None:
    assert network.environment_of(run.attempt(1), "inf0") == {"MASTER_ADDR": "10.0.0.1"}
    assert network.address_of_trainer(run.attempt(1)) == "10.0.0.1"
    with pytest.raises(LaunchError, match=r"node 'login': not in .*trn0, inf0, inf1"):
        network.environment_of(run.attempt(1), "login")


@pytest.mark.parametrize("log", ["inference-1.out", "node-1/engine-0.log"])
def test_another_interface_in_a_log_of_nccl_is_an_event_and_a_warning(
    run: RunDir, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.attempt(1) / "logs" / log).write_text(f"a line\n{DOCKER}another\n")
    said = "NCCL's bootstrap uses docker0 172.17.0.1, not hsn0 10.0.0.3 as planned"
    assert network.compare(run, 1, "inference", 1) == [said]
    assert capsys.readouterr().err == f"warning: inference on inf1: {said}\n"
    assert [(one.node, one.problem) for one in told(run)] == [("inf1", said)]


def test_a_log_that_follows_the_plan_or_has_no_word_of_nccl_tells_nothing(run: RunDir) -> None:
    good = "NCCL INFO Bootstrap : Using hsn0:10.0.0.1<0>\n"
    (run.attempt(1) / "logs" / "trainer-0.out").write_text(good)
    assert network.compare(run, 1, "trainer", 0) == []
    assert network.compare(run, 1, "inference", 0) == []
    assert network.compare(run, 1, "network", 0) == []
    assert told(run) == []


def test_on_one_machine_there_is_no_plan_and_nothing_is_told(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events", "trainer", node="0")
    (tmp_path / "0001").mkdir()
    network.tell(events, tmp_path / "0001", "")
    assert network.address_of_trainer(tmp_path / "0001") == "127.0.0.1"
    assert read_folder(tmp_path / "events") == []
