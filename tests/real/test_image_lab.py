"""A run whose roles are in a real Apptainer image, on the small real cluster: 3 + 1 nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from image_toys import FLAGS, binds, make_skeleton, needs_apptainer
from lab_run import LabRun

from slurm import exit_record
from slurm.lab import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    *needs_apptainer,
]
SHORT = ("cluster.time_min=1", "cluster.signal_s=20", "grace_s=8")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_skeleton(tmp_path_factory.mktemp("image"))


@pytest.fixture
def run(lab: Lab, odd_path: Path) -> LabRun:
    return LabRun(lab, odd_path, name="boxed")


def inside(image: Path) -> list[str]:
    """Return what puts a run of the lab into the skeleton."""
    return [
        f"image={image}",
        f"cluster.binds=[{','.join(binds())}]",
        f"cluster.runtime={shutil.which('apptainer')}",
        f"cluster.runtime_flags=[{','.join(FLAGS)}]",
    ]


def images_of(pids: list[int]) -> set[str]:
    """Return the images that processes are in, by their own environment."""
    found = set()
    for pid in pids:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {word.decode() for word in words if word.startswith(b"APPTAINER_CONTAINER=")}
    return found


def in_python(run: LabRun, role: str, node: int = 0) -> list[int]:
    """Return the pids of a role that are its Python, not the shells and programs around it."""
    pids = run.pids(role, node)
    return [pid for pid in pids if "python" in os.readlink(f"/proc/{pid}/exe")]


def test_every_role_runs_in_the_image_on_3_and_1_nodes(run: LabRun, image: Path) -> None:
    run.train("training.steps=8", "rollout.nodes=3", *inside(image))
    run.until_step(2)
    for role, node in (("trainer", 0), ("inference", 0), ("inference", 2)):
        assert images_of(in_python(run, role, node)) == {f"APPTAINER_CONTAINER={image}"}
    last = run.finish()
    assert (last.action, last.code, last.step_end) == ("done", 0, 8)
    records = [exit_record.read(run.run.attempt(1), "inference", node) for node in range(3)]
    assert [one.cause for one in records if one] == ["done"] * 3
    assert "sha256:" in (run.run.path / "image.json").read_text()


def test_signals_reach_a_role_in_its_image_and_the_requeued_job_goes_on(
    run: LabRun, image: Path
) -> None:
    run.train("training.steps=90", *SHORT, *inside(image))
    last = run.finish()
    first = run.ledger()[0]
    assert (first.action, first.code) == ("requeue", 0)
    assert "ahead of a time limit" in first.ended
    assert first.step_end > 0
    assert (last.action, last.step_end) == ("done", 90)


def test_a_damaged_image_is_refused_before_anything_is_queued(run: LabRun, image: Path) -> None:
    damaged = run.folder / "damaged.sif"
    damaged.write_bytes(image.read_bytes()[:-5000])
    said = run.train(*inside(damaged), check=False)
    assert "truncated" in said
    assert run.lab.run(["squeue", "--noheader"]).stdout == ""
    assert not run.run.path.exists()
