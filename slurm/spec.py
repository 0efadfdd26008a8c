"""What is asked of Slurm, as values: a job of components, one a role, checked when made."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from agentrl.errors import SpecError

Layout = Literal["het", "homogeneous"]
OWN_FLAGS = {
    "nodes": "nodes",
    "ntasks": "nodes and tasks_per_node",
    "ntasks-per-node": "tasks_per_node",
    "cpus-per-task": "cpus_per_task",
    "gpus-per-node": "gpus_per_node",
    "gres": "gres",
    "mem": "mem_gb",
    "partition": "partition",
    "constraint": "constraint",
    "exclude": "exclude",
    "job-name": "name",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "time": "time_min",
    "signal": "signal",
    "output": "output",
    "error": "output, which takes both streams",
    "open-mode": "nothing: it is always append",
    "chdir": "chdir",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "dependency": "submit(dependency=…)",
    "het-group": "the order of the components",
}
"""Long flags that a field sets: given as `extra` they would overrule it without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One role's share of a job. Every node of it is alike."""

    role: str
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    """Asked for as --gpus-per-node, unless `gres` says it in the site's way."""
    gres: str = ""
    """Generic resources of a node in Slurm's words, such as gpu:mi355x:8."""
    mem_gb: int = 0
    """Memory of a node; 0 leaves it to the partition."""
    partition: str = ""
    constraint: str = ""
    exclude: str = ""
    extra: tuple[str, ...] = ()
    """More #SBATCH flags, long ones, such as --exclusive."""
    srun: tuple[str, ...] = ()
    """More srun flags of this role, such as --gpu-bind=closest."""

    def __post_init__(self) -> None:
        where = f"component {self.role!r}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.role):
            raise SpecError(f"role {self.role!r}: must be lower-case letters, digits and _")
        for name in ("nodes", "tasks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} in {where}: must be 1 or more")
        for name in ("gpus_per_node", "mem_gb"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name}={getattr(self, name)} in {where}: must be 0 or more")
        if self.gres and self.gpus_per_node:
            raise SpecError(f"gres={self.gres!r} and gpus_per_node in {where}: give one of them")
        _refuse_odd_text(self, where)
        _check_extra(self.extra, where)
        for flag in self.srun:
            if not flag.startswith("--") or flag.startswith("--het-group"):
                raise SpecError(
                    f"srun flag {flag!r} in {where}: must be a long one, no --het-group"
                )

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One job. The first component holds the batch host, on its first node."""

    name: str
    components: tuple[Component, ...]
    layout: Layout = "het"
    """`het`: a component a role. `homogeneous`: one allocation, its nodes dealt out in order."""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time_min: int = 60
    """Wall limit, minutes."""
    signal: str = ""
    """--signal in Slurm's words, such as USR2@120 or B:USR2@120."""
    requeue: bool = False
    """Let Slurm requeue the job when a node dies or it is preempted."""
    output: str = ""
    """File of the batch script's output; its folder must be there before sbatch."""
    chdir: str = ""
    modules: tuple[str, ...] = ()
    """Environment modules that the script loads."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the script exports; $NAME in a value is expanded on the batch host."""
    comment: str = ""

    def __post_init__(self) -> None:
        where = f"job {self.name!r}"
        if not self.name.strip() or not self.components:
            raise SpecError(f"{where} of {len(self.components)} components: needs a name and one")
        if self.layout not in ("het", "homogeneous"):
            raise SpecError(f"layout={self.layout!r} in {where}: must be het or homogeneous")
        if self.time_min < 1:
            raise SpecError(f"time_min={self.time_min} in {where}: must be 1 or more")
        _refuse_odd_text(self, where)
        _check_roles(self)
        _check_signal(self, where)
        _check_patterns(self.output, where)
        for name, _ in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise SpecError(f"environment variable {name!r} in {where}: no name of a variable")

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(component.role for component in self.components)

    @property
    def is_het(self) -> bool:
        """Whether Slurm sees several components: one alone is a plain job."""
        return self.layout == "het" and len(self.components) > 1

    @property
    def nodes(self) -> int:
        return sum(component.nodes for component in self.components)

    def index(self, role: str) -> int:
        """Return the place of `role` among the components. Raises SpecError naming the roles."""
        if role not in self.roles:
            raise SpecError(f"role {role!r}: job {self.name!r} has {', '.join(self.roles)}")
        return self.roles.index(role)

    def component(self, role: str) -> Component:
        return self.components[self.index(role)]


def literal(path: str) -> str:
    """Return `path` so that Slurm reads no pattern into it."""
    return path.replace("%", "%%")


def _refuse_odd_text(spec: Component | JobSpec, where: str) -> None:
    for item in fields(spec):
        for text in _texts(getattr(spec, item.name)):
            if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
                raise SpecError(f"{item.name}={text!r} in {where}: has a control character")
            if "hetjob" in text.lower():
                raise SpecError(
                    f"{item.name}={text!r} in {where}: some versions of Slurm read `hetjob` "
                    "anywhere as a directive; use another name"
                )


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _texts(one)


def _check_extra(extra: Iterable[str], where: str) -> None:
    for flag in extra:
        if not re.match(r"--[a-z]", flag):
            raise SpecError(f"extra={flag!r} in {where}: must be a long flag, as --exclusive")
        name = re.split(r"[= ]", flag.removeprefix("--"), maxsplit=1)[0]
        if name == "array":
            raise SpecError(
                f"extra={flag!r} in {where}: Slurm has no arrays of heterogeneous jobs; "
                "submit once for each"
            )
        if name in OWN_FLAGS:
            raise SpecError(f"extra={flag!r} in {where}: set by {OWN_FLAGS[name]}; give it there")


def _check_roles(spec: JobSpec) -> None:
    if len(set(spec.roles)) != len(spec.roles):
        raise SpecError(f"roles {', '.join(spec.roles)} in job {spec.name!r}: one comes twice")
    named = [component.role for component in spec.components if component.mem_gb]
    if named and len(named) != len(spec.components):
        raise SpecError(
            f"mem_gb in job {spec.name!r} is set for {', '.join(named)} only: Slurm would hand it "
            "on to the components that follow; set it for every role or for none"
        )
    if spec.layout == "homogeneous":
        for name in ("partition", "gres", "constraint"):
            found = sorted({getattr(component, name) for component in spec.components} - {""})
            if len(found) > 1:
                raise SpecError(
                    f"{name} in job {spec.name!r} is {' and '.join(found)}: one homogeneous "
                    "allocation has one; name one that holds all nodes, or use layout=het"
                )


def _check_signal(spec: JobSpec, where: str) -> None:
    if not spec.signal:
        return
    match = re.fullmatch(r"(?:[BR]{1,2}:)?(?:SIG)?([A-Z0-9]+)@(\d+)", spec.signal)
    if not match:
        raise SpecError(f"signal={spec.signal!r} in {where}: must read NAME@SECONDS, as USR2@120")
    if match[1] in ("USR1", "10"):
        raise SpecError(f"signal={spec.signal!r} in {where}: NCCL's proxy takes USR1; use USR2")
    if int(match[2]) >= spec.time_min * 60:
        raise SpecError(
            f"signal={spec.signal!r} in {where}: comes before the job begins, whose limit is "
            f"time_min={spec.time_min}; lower the seconds or raise the limit"
        )


def _check_patterns(output: str, where: str) -> None:
    bad = re.findall(r"%(?:%|[Ns]|.|$)", output)
    if odd := [code for code in bad if code not in ("%%", "%N", "%s")]:
        raise SpecError(
            f"output={output!r} in {where}: {odd[0]} means another thing in each component; only "
            "%N and %s are safe, %% is a percent sign, and a shell can write $SLURM_JOB_ID"
        )
