"""A real small Slurm on this machine, for trying and testing: every node is a set of namespaces.

The login node is a network, UTS and mount namespace with a bridge and no route out. A compute node
(inf0…, trn0…) has, on that bridge, its own network, hostname, mounts, processes and /dev/shm; the
file system is common. Each claims 16 CPUs, 64 GB and GPUs that are null devices, and has a docker0
with the same address. Partitions: inference, trainer, all, urgent (preempts) and scavenge (is
preempted and requeued). The machine's own Slurm and MUNGE are not touched.

Limits: root; Debian's Slurm 22.05; one kernel and its real CPUs; no control groups, no PMIx; a
killed node is noticed only after Slurm's SlurmdTimeout.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agentrl.errors import ClusterError, ConfigError
from slurm import lab_boot, lab_host
from slurm.files import publish
from slurm.lab_daemons import Daemons, claim
from slurm.lab_files import Node, Plan
from slurm.lab_login import Login


class Lab:
    """One cluster. All that is known of it lies in its directory, so any process may steer it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.daemons = Daemons(self.directory)
        self.login = Login(self.daemons)
        self._plan_file = self.directory / "lab.json"

    @property
    def plan(self) -> Plan:
        """What `up` was asked for last. Raises ClusterError where it never was."""
        if not self._plan_file.is_file():
            raise ClusterError(f"no cluster in {self.directory}; agentrl cluster up boots one")
        return msgspec.json.decode(self._plan_file.read_bytes(), type=Plan)

    @property
    def nodes(self) -> list[Node]:
        return self.plan.nodes()

    def is_up(self) -> bool:
        return "login" in self.daemons.living()

    def states(self) -> dict[str, str]:
        """Return each node's state in Slurm's words, as `idle` or `down*`."""
        return lab_boot.states(self.login)

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with sbatch, srun, … that enter the cluster."""
        path = os.environ.get("PATH", os.defpath)
        return {**os.environ, "PATH": f"{self.login.shims}:{path}"}

    def up(
        self, *, inference: int = 3, trainer: int = 1, gpus: int = 8, accounting: bool = False
    ) -> None:
        """Boot the cluster; return when every node is idle. If that fails, nothing is left.

        It forgets the jobs of an earlier cluster in its directory.
        """
        plan = Plan(inference=inference, trainer=trainer, gpus=gpus, accounting=accounting)
        lab_host.check_root()
        lab_host.check_packages(accounting=accounting)
        lab_host.check_directory(self.directory)
        lab_host.check_kernel()
        with claim(self.directory / "booting"):
            if living := self.daemons.living():
                names = ", ".join(sorted({name.partition(".")[0] for name in living}))
                raise ClusterError(
                    f"a cluster is up in {self.directory} ({names}); "
                    "take it down first, or give another --dir"
                )
            try:
                publish(self._plan_file, msgspec.json.encode(plan))
                lab_boot.boot(self.login, plan)
            except BaseException:
                self.down()
                raise

    def down(self) -> list[str]:
        """End all that runs in the cluster; return what is left, a line each: none, one hopes.

        That is a power cut for all nodes, the login node's shells and commands with them; only
        the database is asked to end.
        """
        self.daemons.stop_gently("mariadbd")
        processes = [f"process {line}" for line in self.daemons.end_all()]
        mounts = lab_host.mounts_below(self.directory)
        return [*processes, *(f"mount {point}" for point in mounts)]

    def kill_node(self, name: str) -> None:
        """Cut the power of a node: all that runs there dies at once."""
        self.login.enter()  # says so where the cluster is down
        self.daemons.kill(self._node(name).name)

    def start_node(self, name: str) -> None:
        """Boot a node that was killed; return when Slurm may use it again."""
        self.login.enter()
        node = self._node(name)
        if name in self.daemons.living():
            raise ClusterError(f"{name} is running; agentrl cluster kill-node {name} cuts it off")
        lab_boot.start_nodes(self.login, [node])
        self.daemons.wait_for(
            lambda: self.states().get(name) in ("idle", "mixed", "allocated"),
            f"Slurm to use {name}",
            needed=["slurmctld", name],
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, its output captured. env: added to its environment.

        Raises ClusterError, if `check`, in the command's own words.
        """
        return self.login.run(argv, check=check, env=env, cwd=cwd)

    def _node(self, name: str) -> Node:
        found = {node.name: node for node in self.nodes}
        if name not in found:
            raise ConfigError(f"no node {name!r} in {self.directory}; nodes: {', '.join(found)}")
        return found[name]
