"""A run and its image: refused before it is queued, kept over resumes, told in the provenance."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path

import pytest
from sif_toys import write_sif

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig
from agentrl.errors import ConfigError, ImageError
from containers import sif
from launch import cluster_run, image_run, resume
from launch.run_dir import RunDir, create, settled
from slurm.render import check_bash


@pytest.fixture
def config(odd_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on the lab in an image whose `apptainer` is a program that succeeds."""
    runtime(odd_path, "exit 0")
    monkeypatch.setenv("PATH", f"{odd_path}/bin:{os.environ['PATH']}")
    image = write_sif(odd_path / "a.sif", labels={"agentrl.gpu": "none"})
    cluster = ClusterConfig(name="lab", environment={"MY_SITE": "1"})
    return settled(RunConfig(name="r", runs_dir=str(odd_path), image=str(image), cluster=cluster))


def runtime(folder: Path, body: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "apptainer"
    program.write_text(f'#!/bin/sh\necho x >>"{folder}/calls"\n{body}\n')
    program.chmod(0o755)


def run_of(config: RunConfig) -> RunDir:
    return RunDir(config.run_dir)


def begun(config: RunConfig) -> RunDir:
    image = image_run.checked(config, run_of(config))
    run = create(config, ["agentrl"], image=image_run.facts(image))
    image_run.record(run, image)
    return run


def test_a_role_sees_the_run_the_site_and_nothing_else_of_the_host(config: RunConfig) -> None:
    made = image_run.container_of(config, run_of(config))
    assert made is not None
    assert made.binds[0] == made.folder == str(config.run_dir)
    assert made.crossing == ("MY_SITE",)
    assert image_run.container_of(dataclasses.replace(config, image=""), run_of(config)) is None


def test_the_digest_is_in_the_provenance_and_is_taken_once(config: RunConfig) -> None:
    run = begun(config)
    found = json.loads((run.path / "provenance.json").read_bytes())["image"]
    assert found["digest"] == sif.digest(Path(config.image))
    assert image_run.checked(config, run) == image_run.recorded(run)
    assert (Path(config.runs_dir) / "calls").read_text() == "x\n"


def test_another_image_is_taken_only_when_that_is_accepted(config: RunConfig) -> None:
    run = begun(config)
    with Path(config.image).open("ab") as file:
        file.write(b"more")
    changed = image_run.checked(config, run)
    with pytest.raises(ImageError, match="--accept-image-change"):
        image_run.record(run, changed)
    image_run.record(run, changed, accept_change=True)
    assert image_run.recorded(run) == changed
    with pytest.raises(ImageError, match="image is empty"):
        image_run.record(run, None)


def test_a_library_that_is_missing_is_told_in_pythons_words(config: RunConfig) -> None:
    said = "ImportError: libamdhip64.so.7: cannot open shared object file"
    runtime(Path(config.runs_dir), f"echo Traceback >&2; echo '{said}' >&2; exit 1")
    with pytest.raises(ImageError, match="no role can start in it: ImportError: libamdhip64"):
        image_run.checked(config, run_of(config))


def test_a_truncated_or_foreign_image_is_refused_before_anything_is_made(config: RunConfig) -> None:
    path = Path(config.image)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ImageError, match="truncated"):
        image_run.checked(config, run_of(config))
    ours, other = (struct.pack("<ii3s", 1, sif.PRIMARY, code) for code in (b"02", b"09"))
    path.write_bytes(whole.replace(ours, other))
    with pytest.raises(ImageError, match="and this machine is"):
        image_run.checked(config, run_of(config))
    assert not config.run_dir.exists()


def test_an_image_on_this_machine_alone_is_refused(config: RunConfig) -> None:
    here = dataclasses.replace(config, cluster=ClusterConfig())
    with pytest.raises(ConfigError, match="cluster=local"):
        image_run.checked(here, run_of(here))


def test_where_no_runtime_is_the_image_counts_as_not_tried(config: RunConfig) -> None:
    cluster = dataclasses.replace(config.cluster, runtime="apptainer-none")
    found = image_run.checked(dataclasses.replace(config, cluster=cluster), run_of(config))
    assert found is not None
    assert not found.is_proved


def test_the_batch_script_enters_the_image_with_the_role_alone(config: RunConfig) -> None:
    text = cluster_run.script_of(config, run_of(config), 1, began="started")
    script = config.run_dir / "script.sbatch"
    script.parent.mkdir()
    script.write_text(text)
    check_bash(script)
    entering, _, after = text.partition("END_OF_ENTER\n)\n")
    assert "a.sif" in entering.partition("<<'END_OF_ENTER'")[2]
    assert "role_python=(python3)" in entering
    assert "a.sif" not in after
    bare = cluster_run.script_of(dataclasses.replace(config, image=""), run_of(config), 1, began="")
    assert 'role_python=("${python[@]}")' in bare
    assert "apptainer" not in bare


def test_a_sites_own_roles_are_what_is_tried(config: RunConfig) -> None:
    assert image_run.imports_of(config).startswith("import launch.role, launch.roles, agentrl.")
    config.cluster.environment["AGENTRL_ROLES"] = "their_roles"
    assert image_run.imports_of(config) == "import launch.role, their_roles"


def test_resume_takes_another_image_only_when_told(config: RunConfig) -> None:
    run = begun(config)
    with Path(config.image).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ImageError, match="--accept-image-change"):
        resume.main([str(run.path)])
    assert resume.changed(config, [f"image={config.image}"]).image == config.image
