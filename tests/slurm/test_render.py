"""From specs to scripts: golden files, invariants, and bash's own check."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slurm.examples
from agentrl.errors import SpecError
from slurm.examples import examples
from slurm.render import (
    SEPARATOR,
    check_bash,
    directives,
    double_quoted,
    render,
    srun_everywhere,
    srun_flags,
    wrapped,
)
from slurm.spec import Component, JobSpec

GOLDEN = Path(__file__).parent / "golden"
PAIR = JobSpec(
    name="it's a run",
    components=(
        Component(
            role="trainer",
            cpus_per_task=56,
            gres="gpu:mi250:8",
            mem_gb=480,
            partition="train",
            extra=("--exclusive", "--mail-user=a b@c"),
            srun=("--gpu-bind=closest",),
        ),
        Component(
            role="inference",
            nodes=3,
            tasks_per_node=2,
            cpus_per_task=28,
            gres="gpu:mi250:8",
            mem_gb=240,
            partition="train",
            constraint="nvme&fast",
            exclude="n[001-003]",
        ),
    ),
    account="project_1",
    qos="normal",
    reservation="maintenance test",
    time_min=2 * 24 * 60 + 90,
    signal="USR2@120",
    requeue=True,
    output="/scratch/it's 100%%/%N.log",
    chdir="/home/a b",
    modules=("LUMI", "rocm/7.2"),
    environment=(("CACHE", '/tmp/$USER/"x" `y` $(z) ${SLURM_JOB_ID}'),),
    comment="for $me",
)


def golden(spec: JobSpec) -> str:
    return render(
        "executor.sh.j2", spec, folder="/scratch/it's", key="het-0", python=["/a b/python3"]
    )


@pytest.mark.parametrize("layout", ["het", "homogeneous"])
def test_the_script_is_the_golden_one(layout: str) -> None:
    path = GOLDEN / f"executor_{layout}.sbatch"
    text = golden(replace(PAIR, layout=layout))
    assert path.read_text() == text, "if that is meant, write the new text there"


def test_the_examples_are_what_the_renderer_makes() -> None:
    folder = Path(slurm.examples.__file__).parent
    found = {path.name: path.read_text() for path in folder.glob("*.sbatch")}
    assert found == examples(), "`python -m slurm.examples` writes them anew"


@pytest.mark.parametrize("layout", ["het", "homogeneous"])
def test_bash_takes_the_script(odd_path: Path, layout: str) -> None:
    path = odd_path / "script.sbatch"
    path.write_text(golden(replace(PAIR, layout=layout)))
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_that_is_no_bash_is_refused_in_its_words(odd_path: Path) -> None:
    (odd_path / "x").write_text("if true; then\n")
    with pytest.raises(SpecError, match=r"bash -n .*it's a folder/x exited 2: .*syntax error"):
        check_bash(odd_path / "x")


def test_a_value_that_a_template_needs_is_named() -> None:
    with pytest.raises(SpecError, match=r"executor\.sh\.j2: 'folder' is undefined"):
        render("executor.sh.j2", PAIR, key="het-0", python=["python3"])


def test_an_environment_value_is_expanded_by_names_only() -> None:
    text = double_quoted('"a" $HOME ${HOME} $(echo no) `echo no` \\$HOME $ ${x:-no}')
    done = subprocess.run(
        ["bash", "-c", f"printf %s {text}"],
        env={"HOME": "/h"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == '"a" /h /h $(echo no) `echo no` \\/h $ ${x:-no}'


# Invariants


TEXT = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=12).filter(
    lambda text: "hetjob" not in text.lower()
)
COMPONENT = st.builds(
    Component,
    role=st.just("x"),
    nodes=st.integers(1, 999),
    tasks_per_node=st.integers(1, 16),
    cpus_per_task=st.integers(1, 256),
    gpus_per_node=st.integers(0, 8),
    constraint=st.just(""),
    exclude=TEXT,
)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    parts = draw(st.lists(COMPONENT, min_size=1, max_size=4))
    return JobSpec(
        name="x" + draw(TEXT),
        components=tuple(replace(part, role=f"role{i}") for i, part in enumerate(parts)),
        layout=draw(st.sampled_from(["het", "homogeneous"])),
        account=draw(TEXT),
        comment=draw(TEXT),
        chdir=draw(TEXT),
        time_min=draw(st.integers(1, 20000)),
    )


def blocks(spec: JobSpec) -> list[dict[str, str]]:
    """Return what a shell would read out of the directives, by component."""
    found: list[dict[str, str]] = [{}]
    for line in directives(spec).splitlines():
        if line == SEPARATOR:
            found.append({})
            continue
        assert line.startswith("#SBATCH --")
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        name, _, value = word.partition("=")
        assert name not in found[-1], f"{name} twice"
        found[-1][name] = value
    return found


@given(jobs())
def test_every_component_spells_its_nodes_tasks_and_cpus(spec: JobSpec) -> None:
    found = blocks(spec)
    assert len(found) == (len(spec.components) if spec.layout == "het" else 1)
    for block in found:
        assert {"--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task"} <= set(block)
    assert sum(int(block["--nodes"]) for block in found) == spec.nodes


@given(jobs())
def test_every_text_arrives_as_it_was(spec: JobSpec) -> None:
    first = blocks(spec)[0]
    assert first["--job-name"] == spec.name
    assert first["--open-mode"] == "append"
    for name, value in (("account", spec.account), ("comment", spec.comment)):
        assert first.get(f"--{name}", "") == value


@given(jobs())
def test_one_allocation_holds_what_every_role_asks(spec: JobSpec) -> None:
    (block,) = blocks(replace(spec, layout="homogeneous"))
    for part in spec.components:
        assert int(block["--cpus-per-task"]) >= part.cpus_per_task
        assert int(block["--ntasks-per-node"]) >= part.tasks_per_node
        assert int(block.get("--gpus-per-node", 0)) >= part.gpus_per_node


def values(flags: Sequence[str], name: str) -> list[int]:
    return [int(flag.partition("=")[2]) for flag in flags if flag.startswith(f"--{name}=")]


@given(jobs())
def test_every_srun_says_where_and_how_many(spec: JobSpec) -> None:
    for index, part in enumerate(spec.components):
        flags = srun_flags(spec, part.role)
        assert values(flags, "nodes") == [part.nodes]
        assert values(flags, "ntasks") == [part.nodes * part.tasks_per_node]
        assert values(flags, "cpus-per-task") == [part.cpus_per_task]
        assert values(flags, "het-group") == ([index] if spec.is_het else [])


@given(jobs())
def test_the_slices_of_one_allocation_are_disjoint_and_whole(spec: JobSpec) -> None:
    spec = replace(spec, layout="homogeneous")
    taken = []
    for part in spec.components:
        (first,) = values(srun_flags(spec, part.role), "relative")
        taken += range(first, first + part.nodes)
    assert taken == list(range(spec.nodes))


@given(jobs())
def test_a_step_everywhere_has_one_task_on_each_node(spec: JobSpec) -> None:
    words = srun_everywhere(spec, ["hostname"])
    assert sum(values(words, "ntasks")) == spec.nodes
    assert words.count("hostname") == words.count(":") + 1
    assert len(values(words, "het-group")) == (len(spec.components) if spec.is_het else 0)


@settings(max_examples=20)
@given(st.lists(TEXT, min_size=1, max_size=30))
def test_wrapped_words_are_the_same_to_a_shell(words: list[str]) -> None:
    assert shlex.split(wrapped(words).replace("\\\n", "")) == words
