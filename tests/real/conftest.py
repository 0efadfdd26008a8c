"""A real small Slurm for the tests of this folder, whole, idle and with an empty queue for each."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lab_run import command_lines, patient

from agentrl.errors import ClusterError, WaitTimeout
from slurm import lab_host
from slurm.lab import Lab
from slurm.lab_process import wait_for

RESTORE_S = 240.0
LEAVE_S = 90.0
"""Until what ended jobs have left on a node is gone: Slurm's own step daemons take a moment."""


def needs(*, accounting: bool = False) -> None:
    """Skip, with the reason, where this machine cannot have a cluster."""
    try:
        lab_host.check_root()
        lab_host.check_packages(accounting=accounting)
        lab_host.check_kernel()
    except ClusterError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def cluster(directory: Path, *, accounting: bool = False) -> Iterator[Lab]:
    """Yield a cluster, whose end leaves nothing, even where this process is killed."""
    needs(accounting=accounting)
    lab = Lab(directory)
    down = shlex.join([sys.executable, "-m", "launch.cluster", "down", "--dir", str(directory)])
    with subprocess.Popen(  # its standard input ends when this process does
        ["sh", "-c", f"cat >/dev/null; exec {down} >/dev/null"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    ):
        lab.up(accounting=accounting)
        try:
            yield lab
        finally:
            left = lab.down()
            shutil.rmtree(directory / "database", ignore_errors=True)
            assert left == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster of 3 inference nodes and a trainer node; one for each process of pytest-xdist."""
    with cluster(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="session")
def lab_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The same with slurmdbd, so that sacct answers."""
    with cluster(tmp_path_factory.mktemp("acct"), accounting=True) as made:
        yield made


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster that is not up; taken down after the test."""
    needs()
    made = Lab(tmp_path_factory.mktemp("bare") / "lab")  # tmp_path is too long
    yield made
    assert made.down() == []


@pytest.fixture(autouse=True)
def _restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each test the session's cluster as after its boot: whole, idle, an empty queue."""
    names = {"lab", "lab_accounting"} & set(request.fixturenames)
    labs = [request.getfixturevalue(name) for name in sorted(names)]
    yield
    for made in labs:
        restore(made)


def restore(lab: Lab) -> None:
    """Cancel all jobs, start what was killed, wait until every node is idle and has no strays."""
    lab.run(["scancel", "--user=root"], check=False)
    off = {node.name for node in lab.nodes} - set(lab.daemons.living())
    for name in sorted(off):
        lab.start_node(name)

    def is_restored() -> bool:
        queue = lab.run(["squeue", "--noheader"]).stdout.strip()
        return not queue and set(lab.states().values()) == {"idle"}

    wait_for(patient(is_restored), RESTORE_S, "an idle cluster after the test")
    with contextlib.suppress(WaitTimeout):
        wait_for(lambda: not strays(lab), LEAVE_S, "nodes without strays")
    assert strays(lab) == []


def strays(lab: Lab) -> list[str]:
    """Return the command lines of what runs on the nodes, sandboxes too, beside their slurmd."""
    inits = [one.pid for name, one in lab.daemons.living().items() if name.endswith(".init")]
    pids = {one.pid for init in inits for one in psutil.Process(init).children(recursive=True)}
    lines = command_lines().items()
    return [" ".join(words) for pid, words in lines if pid in pids and words[:1] != ["slurmd"]]
