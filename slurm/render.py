"""From a JobSpec to the text of a batch script. Pure, but for `check_bash`.

Every component and every srun spells its nodes, tasks and CPUs: what is left out leaks in from
the other component.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import SpecError
from slurm.spec import Component, JobSpec

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
SEPARATOR = "#SBATCH hetjob"
STEP = ("--export=ALL", "--kill-on-bad-exit=0", "--wait=0")
"""What a site's defaults may change: the environment goes along, and a task's end ends no other."""
OVERLAP = ("--overlap", "--mem=0")
"""Without the second a step finds no memory beside one that has it all (seen on 22.05)."""


def directives(spec: JobSpec) -> str:
    """Return the #SBATCH lines, one block a component, `#SBATCH hetjob` between."""
    blocks = [_component_flags(spec, component) for component in _allocations(spec)]
    blocks[0] = _job_flags(spec) + blocks[0]
    lines = [[f"#SBATCH {_quoted_flag(flag)}" for flag in block] for block in blocks]
    return f"\n{SEPARATOR}\n".join("\n".join(block) for block in lines)


def render(template: str, spec: JobSpec, **values: object) -> str:
    """Return the script that `template` (a name in slurm/templates) makes of `spec`.

    In the template: `spec`, `directives`, `srun_flags(spec, role, …)`, `srun_everywhere`, `join`
    and `wrapped` (words as shell text), the filters `q` (shell quoting) and `dq` (double quotes, in
    which $NAME is expanded), and `values`.
    Raises SpecError for a value that is missing.
    """
    from jinja2 import UndefinedError

    try:
        return _environment().get_template(template).render(spec=spec, **values)
    except UndefinedError as error:
        raise SpecError(f"template {template}: {error}; pass it to render()") from error


def srun_flags(
    spec: JobSpec,
    role: str,
    *,
    nodes: int | None = None,
    tasks_per_node: int | None = None,
    overlap: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return srun's flags for a step of `role`: where, how many, and with what.

    nodes, tasks_per_node: another shape than the component's. overlap: beside steps that run
    there already.
    """
    component = spec.component(role)
    first = sum(one.nodes for one in spec.components[: spec.index(role)])
    count, per_node = nodes or component.nodes, tasks_per_node or component.tasks_per_node
    flags = [f"--het-group={spec.index(role)}"] if spec.is_het else [f"--relative={first}"]
    flags += [
        f"--nodes={count}",
        f"--ntasks={count * per_node}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={component.cpus_per_task}",
        *_gpu_flags(component),
        *STEP,
        *(OVERLAP if overlap else ()),
        *component.srun,
        *extra,
    ]
    return flags


def srun_everywhere(
    spec: JobSpec, command: Sequence[str], *, extra: Sequence[str] = ()
) -> list[str]:
    """Return the words of one srun that runs `command` once on every node of the job.

    Ranks are 0 to spec.nodes − 1 in the order of the components.
    """
    if not spec.is_het:
        flags = [f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1"]
        return ["srun", *flags, "--cpus-per-task=1", *STEP, *OVERLAP, *extra, *command]
    words = ["srun"]
    for index, component in enumerate(spec.components):
        flags = [f"--het-group={index}", f"--nodes={component.nodes}"]
        flags += [f"--ntasks={component.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
        words += [*([":"] if index else []), *flags, *STEP, *OVERLAP, *extra, *command]
    return words


def check_bash(script: Path) -> None:
    """Raise SpecError in bash's words if `script` is no valid one."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpecError(f"bash -n {script} exited {done.returncode}: {done.stderr.strip()}")


def double_quoted(text: str) -> str:
    """Quote for bash so that of all expansions only $NAME and ${NAME} are left."""
    escaped = re.sub(r'([\\"`])', r"\\\1", text)
    return '"' + re.sub(r"\$(?!\w|\{\w+\})", r"\\$", escaped) + '"'


def wrapped(words: Sequence[str], *, indent: int = 2) -> str:
    """Return `words` quoted for the shell, broken by backslashes into lines of 98 at most."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) > 95 - indent * (len(lines) > 1):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return f" \\\n{' ' * indent}".join(lines)


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # a third of our import

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # shell, not HTML; what needs quoting has a filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"q": lambda value: shlex.quote(str(value)), "dq": double_quoted}
    environment.globals |= {
        "directives": directives,
        "srun_flags": srun_flags,
        "srun_everywhere": srun_everywhere,
        "join": shlex.join,
        "wrapped": wrapped,
    }
    return environment


def _job_flags(spec: JobSpec) -> list[str]:
    """Return what later components inherit."""
    days, minutes = divmod(spec.time_min, 24 * 60)
    limit = f"{f'{days}-' if days else ''}{minutes // 60:02d}:{minutes % 60:02d}:00"
    flags = _given(
        ("job-name", spec.name),
        ("comment", spec.comment),
        ("time", limit),
        ("signal", spec.signal),
        ("chdir", spec.chdir),
        ("output", spec.output),
        ("open-mode", "append"),
    )
    return [*flags, "--requeue" if spec.requeue else "--no-requeue"]


def _component_flags(spec: JobSpec, component: Component) -> list[str]:
    return [
        *_given(
            ("account", spec.account),
            ("qos", spec.qos),
            ("reservation", spec.reservation),
            ("partition", component.partition),
            ("constraint", component.constraint),
            ("exclude", component.exclude),
            ("nodes", str(component.nodes)),
            ("ntasks", str(component.tasks)),
            ("ntasks-per-node", str(component.tasks_per_node)),
            ("cpus-per-task", str(component.cpus_per_task)),
        ),
        *_gpu_flags(component),
        *_given(("mem", f"{component.mem_gb}G" if component.mem_gb else "")),
        *component.extra,
    ]


def _allocations(spec: JobSpec) -> tuple[Component, ...]:
    """Return the components as Slurm sees them: one that holds all roles where homogeneous."""
    if spec.is_het or len(spec.components) == 1:
        return spec.components
    parts = spec.components

    def of(name: str) -> str:
        return next((text for part in parts if (text := getattr(part, name))), "")

    def most(name: str) -> int:
        return max(int(getattr(part, name)) for part in parts)

    gres = of("gres")
    merged = Component(
        role="all",
        nodes=spec.nodes,
        tasks_per_node=most("tasks_per_node"),
        cpus_per_task=most("cpus_per_task"),
        gpus_per_node=0 if gres else most("gpus_per_node"),
        gres=gres,
        mem_gb=most("mem_gb"),
        partition=of("partition"),
        constraint=of("constraint"),
        exclude=",".join(dict.fromkeys(part.exclude for part in parts if part.exclude)),
        extra=tuple(dict.fromkeys(flag for part in parts for flag in part.extra)),
    )
    return (merged,)


def _gpu_flags(component: Component) -> list[str]:
    gpus = str(component.gpus_per_node) if component.gpus_per_node else ""
    return _given(("gres", component.gres), ("gpus-per-node", gpus))


def _given(*flags: tuple[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags if value]


def _quoted_flag(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else name
