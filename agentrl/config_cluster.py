"""Where a run runs: the `cluster` section. `cluster=NAME` lays in configs/clusters/NAME.yaml."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError

CLUSTERS = Path(__file__).resolve().parent.parent / "configs" / "clusters"


@dataclass
class RoleResources:
    partition: str = ""
    """Slurm partition; empty is the cluster's default one."""
    cpus_per_task: int = 1
    """Cores of one node for this role, which is one task a node."""
    gpus_per_node: int = 0
    """GPUs of one node, asked for as --gpus-per-node; 0 asks for none."""
    gres: str = ""
    """Instead of gpus_per_node: a node's generic resources in Slurm's words, as gpu:mi355x:8."""
    gpu_gb: int = 0
    """Memory of one GPU, GiB, as its driver tells it; 0: not known, nothing is held against it."""
    mem_gb: int = 0
    """Memory of one node, GiB, for both roles or for none; 0 leaves it to the partition."""
    constraint: str = ""
    """Node features that Slurm has to match."""
    exclude: str = ""
    """Nodes to stay away from, in Slurm's words, as n[001-003]."""
    extra: list[str] = field(default_factory=list)
    """More #SBATCH flags for this role, long ones, as --exclusive."""
    srun: list[str] = field(default_factory=list)
    """More srun flags for this role, as --gpu-bind=closest."""

    @property
    def gpus(self) -> int:
        """GPUs of one node that are asked for; 0 where neither key tells a number."""
        named = [one.split(":") for one in self.gres.split(",")]
        counts = [words[-1] for words in named if words[0] == "gpu"]
        return self.gpus_per_node or sum(int(count) for count in counts if count.isdecimal())


@dataclass
class ClusterConfig:
    name: str = "local"
    """`local`: processes on this machine. Any other name: a Slurm job."""
    source: str = ""
    """Where a preset's facts come from, and what nobody has tried."""
    layout: str = "het"
    """`het`: a component a role. `homogeneous`: one allocation with the roles by node slice."""
    account: str = ""
    """Slurm account that pays."""
    qos: str = ""
    """Slurm quality of service."""
    reservation: str = ""
    """Slurm reservation."""
    time_min: int = 60
    """Wall limit of one launch attempt, minutes."""
    signal_s: int = 120
    """Seconds before that limit at which the roles are told to save; 0 tells them nothing."""
    requeue: str = "requeue"
    """Next attempt: `requeue` the same job, or a `chain` of jobs queued ahead, one at a time."""
    chain_depth: int = 4
    """Jobs of a chain."""
    trainer: RoleResources = field(default_factory=RoleResources)
    inference: RoleResources = field(default_factory=RoleResources)
    modules: list[str] = field(default_factory=list)
    """Environment modules that the batch script loads, in order."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the batch script exports; $NAME in a value is expanded there."""
    runtime: str = "apptainer"
    """Program that enters a run's image: `apptainer`, `singularity`, or the path of one."""
    runtime_flags: list[str] = field(default_factory=list)
    """More flags of its `exec`, as --userns."""
    binds: list[str] = field(default_factory=list)
    """Paths of the host that containers see, as SRC, SRC:DST or SRC:DST:ro."""
    interface_hints: list[str] = field(default_factory=list)
    """Network interfaces to prefer, best first, by name or shell pattern, as hsn*."""
    interface_pin: str = ""
    """The one interface to use; it is verified all the same."""
    scratch: str = ""
    """Folder on each node's own disk or memory; $NAME is expanded on the node."""

    @property
    def is_slurm(self) -> bool:
        return self.name != "local"


def preset(
    name: str, where: str, *, section: str, folder: Path, beside: Path | None = None
) -> Path:
    """Return the file of a preset: a name in `folder`, or the path of a YAML. Raises ConfigError.

    beside: folder that a relative path is looked up from.
    """
    if name.endswith((".yaml", ".yml")):
        return (beside or Path.cwd()) / name
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name in known:
        return folder / f"{name}.yaml"
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise ConfigError(
        f"{where}: {section}={name!r}: no such preset{hint}; there are {', '.join(known)}, or give "
        "the path of a YAML of your own"
    )


def check_cluster(config: ClusterConfig) -> None:
    """Refuse what cannot work on any cluster."""
    for key, least in (("time_min", 1), ("chain_depth", 1), ("signal_s", 0)):
        if (found := getattr(config, key)) < least:
            raise ConfigError(f"cluster.{key}={found}: must be {least} or more")
    if config.signal_s >= config.time_min * 60:
        raise ConfigError(
            f"cluster.signal_s={config.signal_s} is not under cluster.time_min={config.time_min} "
            "minutes; lower the first or raise the second"
        )
    for role in ("trainer", "inference"):
        resources: RoleResources = getattr(config, role)
        if resources.cpus_per_task < 1:
            raise ConfigError(
                f"cluster.{role}.cpus_per_task={resources.cpus_per_task}: must be 1 or more"
            )
        if resources.gres and resources.gpus_per_node:
            raise ConfigError(f"cluster.{role}: gres and gpus_per_node; give one of them")
    for name, value in config.environment.items():
        if not isinstance(value, str):
            raise ConfigError(f"cluster.environment.{name}={value}: must be a text; quote it")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.environment.{name}: no name of a variable")
