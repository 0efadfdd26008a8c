"""A run whose roles are in a real Apptainer image, on the small real cluster: 3 + 1 nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from image_toys import FLAGS, binds, make_skeleton, needs_apptainer
from lab_run import CONFIG, HERE, LabRun

from slurm import exit_record
from slurm.lab import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    *needs_apptainer,
]
SHORT = ("cluster.time_min=2", "cluster.signal_s=60")


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


def doctor(run: LabRun, *overrides: str) -> dict[str, tuple[str, str]]:
    """Ask the nodes; return the state and the words of each finding, by name."""
    run.config.write_text(CONFIG)
    given = [
        f"name={run.name}",
        f"runs_dir={run.folder / 'runs'}",
        "cluster.environment.AGENTRL_ROLES=light_roles",
        f"cluster.environment.PYTHONPATH={HERE}",
        *overrides,
    ]
    said = run.agentrl("doctor", run.config, "--nodes", "--json", *given, check=False)
    found = json.loads(said[said.index("{") : said.rindex("}") + 1])
    return {item["name"]: (item["state"], item["found"]) for item in found["findings"]}


def images_of(pids: list[int]) -> set[str]:
    """Return the images that processes are in, by their own environment."""
    found = set()
    for pid in pids:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {word.decode() for word in words if word.startswith(b"APPTAINER_CONTAINER=")}
    return found


def in_python(run: LabRun, role: str, node: int = 0) -> list[int]:
    """Return the pids of a role that are its Python, not the shells and programs around it."""
    found = []
    for pid in run.pids(role, node):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [pid] if "python" in os.readlink(f"/proc/{pid}/exe") else []
    return found


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
    run.hold(4)
    run.train("training.steps=12", *SHORT, *inside(image))
    last = run.finish()
    first = run.ledger()[0]
    assert (first.action, first.code) == ("requeue", 0)
    assert "ahead of a time limit" in first.ended
    assert first.step_end == 3
    assert (last.action, last.step_end) == ("done", 12)


def test_a_damaged_image_is_refused_before_anything_is_queued(run: LabRun, image: Path) -> None:
    damaged = run.folder / "damaged.sif"
    damaged.write_bytes(image.read_bytes()[:-5000])
    said = run.train(*inside(damaged), check=False)
    assert "truncated" in said
    assert run.lab.run(["squeue", "--noheader"]).stdout == ""
    assert not run.run.path.exists()


def test_doctor_asks_every_node_as_the_run_would_and_leaves_nothing(
    run: LabRun, image: Path
) -> None:
    found = doctor(run, "rollout.nodes=3", *inside(image))
    assert found["nodes"] == ("ok", "4 of 4 answered: trn0, inf0, inf1, inf2")
    assert "entered in" in found["inf2"][1]
    for name in ("image", "shared files", "image digests"):
        assert found[name][0] == "ok", found[name]
    assert run.lab.run(["squeue", "--noheader"]).stdout == ""
    assert os.listdir(run.folder / "runs") == []


def test_doctor_names_the_nodes_on_which_a_bind_is_missing(run: LabRun, image: Path) -> None:
    words = inside(image)
    words[1] = words[1].replace("]", ",/no/such/folder]")
    found = doctor(run, "rollout.nodes=1", *words)
    for name in ("trn0 image", "inf0 image"):
        assert found[name][0] == "fail"
        assert "/no/such/folder" in found[name][1]
