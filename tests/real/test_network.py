"""The network of a heterogeneous job's nodes, chosen and proved on the real small cluster.

Every node has a docker0 of the same address there, as nodes with Docker do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm.lab import Lab
from slurm.network import read

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


def prove(lab: Lab, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run slurm.proof as one step over the trainer and all inference nodes of a het job."""
    folder.mkdir(exist_ok=True)
    nodes = sorted((node.name for node in lab.nodes), reverse=True)  # trn0 first
    words = [sys.executable, "-m", "slurm.proof", str(folder), "--nodes", ",".join(nodes)]
    count = str(len(nodes) - 1)
    trainer = ["--het-group=0", "-N1", "-n1", "-c1", *words, *flags]
    inference = ["--het-group=1", "-N", count, "-n", count, "-c1", *words, *flags]
    allocate = ["salloc", "-p", "trainer", "-N1", "-n1", ":"]
    allocate += ["-p", "inference", "-N", count, "-n", count]
    step = ["srun", "--label", *trainer, ":", *inference]
    return lab.run([*allocate, *step], check=False)


def test_the_job_gets_the_cable_and_never_docker0(lab: Lab, tmp_path: Path) -> None:
    done = prove(lab, tmp_path / "it's an attempt")
    assert done.returncode == 0, done.stderr
    made = read(tmp_path / "it's an attempt")
    assert {one.interface for one in made.nodes.values()} == {"eth0"}
    assert {node.name: node.address for node in lab.nodes} == {
        name: one.address for name, one in made.nodes.items()
    }
    assert made.nodes["inf2"].environment["MASTER_ADDR"] == made.nodes["trn0"].address
    assert made.proof.startswith("12 ordered pairs answered")
    assert any(one.startswith("docker0 172.17.0.1/16: the same address") for one in made.refused)


def test_two_steps_of_one_job_or_of_two_meet_apart(lab: Lab, tmp_path: Path) -> None:
    assert [prove(lab, tmp_path).returncode for _ in range(2)] == [0, 0]
    assert len(list((tmp_path / "network").iterdir())) == 2


def test_with_the_picker_off_the_proof_refuses_docker0(lab: Lab, tmp_path: Path) -> None:
    done = prove(lab, tmp_path, "--unchecked", "docker0", "--connect", "1")
    assert done.returncode == 1
    assert "docker0, unchecked:" in done.stderr
    assert "asked inf0 at 172.17.0.1" in done.stderr
    assert not list(tmp_path.glob("network.json"))


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("docker0", "docker0 172.17.0.1/16: the same address on inf0, inf1, inf2, trn0"),
        ("hsn7", "hsn7: not on inf1, which has docker0, eth0, lo"),
        ("10.99.0.0/16", "10.99.0.0/16: not on trn0"),
    ],
)
def test_a_pin_that_is_duplicated_or_nowhere_is_refused_on_every_node(
    lab: Lab, tmp_path: Path, pin: str, said: str
) -> None:
    done = prove(lab, tmp_path, "--pin", pin)
    assert done.returncode == 1
    assert done.stderr.count(said) >= len(lab.nodes)
    assert not list(tmp_path.glob("network.json"))


def test_a_pin_that_is_good_is_taken(lab: Lab, tmp_path: Path) -> None:
    assert prove(lab, tmp_path, "--pin", "eth0").returncode == 0
    assert read(tmp_path).nodes["trn0"].interface == "eth0"


def test_a_node_that_never_comes_is_named_at_the_limit(lab: Lab, tmp_path: Path) -> None:
    done = prove(lab, tmp_path, "--limit", "30", "--nodes", "trn0,inf0,inf1,inf2,inf9")
    assert done.returncode == 1
    assert "missing: inf9; there: trn0, inf0, inf1, inf2" in done.stderr
