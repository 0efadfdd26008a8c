"""Batch scripts to copy and edit. `python -m slurm.examples` writes them anew from the renderer."""

from __future__ import annotations

from dataclasses import replace

from slurm.render import render
from slurm.spec import Component, JobSpec

HET = JobSpec(
    name="two-roles",
    components=(
        Component(role="trainer", nodes=1, cpus_per_task=8, gpus_per_node=8),
        Component(role="inference", nodes=2, cpus_per_task=8, gpus_per_node=8),
    ),
    time_min=240,
    signal="USR2@300",
    requeue=True,
    output="logs/two-roles.log",
)
ABOUT = {
    "het_job.sbatch": (
        "One heterogeneous job: a trainer node, and inference nodes as its second component.",
        HET,
    ),
    "one_allocation.sbatch": (
        "One homogeneous allocation: the first node trains, the others are for inference.",
        replace(HET, layout="homogeneous"),
    ),
}


def examples() -> dict[str, str]:
    """Return each example's text by its file name."""
    return {
        name: render("plain.sh.j2", spec, about=about, name=name)
        for name, (about, spec) in ABOUT.items()
    }
