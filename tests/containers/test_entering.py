"""How a role's step enters the image: golden text, what crosses, what bash makes of it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import ImageError
from containers.entering import (
    CROSSING,
    WIDTH,
    Container,
    crosses,
    distinct,
    enter_script,
    link_targets,
)

GOLDEN = Path(__file__).parent / "golden"
MARK = "$SLURM_JOB_ID.$SLURM_STEP_ID.$SLURMD_NODENAME"
MI355X = Container(
    image="/project/images/agentrl-rocm.sif",
    size=31_457_280_000,
    gpu="rocm",
    folder="/project/runs/qwen3",
    binds=("/project/runs/qwen3", "/project/models/Qwen3-8B", "/scratch", "/dev/shm:/dev/shm"),
    scratch="/tmp/agentrl-$USER",
    crossing=("MIOPEN_USER_DB_PATH", "MY_SITE"),
)
SITES = {
    "mi355x": MI355X,
    "lumi": replace(MI355X, runtime="singularity", binds=("/scratch/it's a folder",)),
    "alps": replace(MI355X, gpu="cuda", size=0, scratch="", flags=("--userns",)),
}


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, first on PATH, which notes its arguments and its environment."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/words"\nenv >"{tmp_path}/env"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def enter(
    container: Container, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", enter_script(container, MARK), "role", *command]
    return subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("site", SITES)
def test_the_text_is_the_golden_one(site: str) -> None:
    text = enter_script(SITES[site], MARK) + "\n"
    path = GOLDEN / f"enter_{site}.sh"
    assert path.read_text() == text, "if that is meant, write the new text there"


@pytest.mark.parametrize("site", SITES)
def test_the_text_fits_a_terminal(site: str) -> None:
    lines = enter_script(SITES[site], MARK).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 30


def test_the_command_keeps_its_words_and_apptainer_gets_ours(apptainer: Path) -> None:
    made = replace(MI355X, size=0, scratch=str(apptainer / "home it's"))
    assert enter(made, "python3", "a b", "$x").returncode == 0
    words = (apptainer / "words").read_text().splitlines()
    assert words[:3] == ["exec", "--cleanenv", "--rocm"]
    assert f"--home={made.scratch}" in words
    assert words[-4:] == ["role", "python3", "a b", "$x"]


def test_the_hosts_variables_stay_out_unless_they_are_named(apptainer: Path) -> None:
    made = replace(MI355X, size=0, scratch=str(apptainer / "home"))
    enter(made, "true", SLURM_JOB_ID="7", LD_PRELOAD="", PYTHONPATH="/x", MY_SITE="a b", FI_X="1")
    found = dict(line.split("=", 1) for line in (apptainer / "env").read_text().splitlines())
    inside = {name: value for name, value in found.items() if name.startswith("APPTAINERENV_")}
    assert inside["APPTAINERENV_SLURM_JOB_ID"] == "7"
    assert inside["APPTAINERENV_MY_SITE"] == "a b"
    assert inside["APPTAINERENV_FI_X"] == "1"
    assert not {"APPTAINERENV_PYTHONPATH", "APPTAINERENV_LD_PRELOAD", "APPTAINERENV_PATH"} & set(
        inside
    )


def test_a_scratch_that_cannot_be_made_ends_the_step_with_its_name(apptainer: Path) -> None:
    (apptainer / "file").write_text("")
    done = enter(replace(MI355X, scratch=str(apptainer / "file" / "x")), "true")
    assert done.returncode == 2
    assert "set cluster.scratch" in done.stderr
    assert not (apptainer / "words").exists()


def test_another_file_under_the_images_name_is_refused_by_a_later_life(apptainer: Path) -> None:
    image = apptainer / "it's an image.sif"
    image.write_bytes(b"x" * 10)
    made = replace(MI355X, image=str(image), size=10, scratch=str(apptainer / "home"))
    assert enter(made, "true").returncode == 0
    assert str(image) in (apptainer / "words").read_text().splitlines()
    (apptainer / "words").unlink()
    image.write_bytes(b"y" * 11)
    done = enter(made, "true")
    assert done.returncode == 2
    assert "not the file that this job was queued with" in done.stderr
    assert not (apptainer / "words").exists()


def test_a_variable_of_several_lines_crosses_whole(apptainer: Path) -> None:
    made = replace(MI355X, size=0, scratch=str(apptainer / "home"))
    assert enter(made, "true", MY_SITE="a\nB=$(touch x) 'b", FI_="").returncode == 0
    assert "APPTAINERENV_MY_SITE=a\nB=$(touch x) 'b\n" in (apptainer / "env").read_text()


def test_every_variable_that_crosses_has_its_reason() -> None:
    assert all(len(reason) > 10 for reason in CROSSING.values())
    assert crosses("NCCL_SOCKET_IFNAME")
    assert not crosses("XNCCL_DEBUG")
    assert not crosses("PYTHONPATH")


def test_a_bind_below_another_is_left_out() -> None:
    assert distinct(["/a/b", "/a", "/ab", "/a", "/a/c:/d"]) == ["/a", "/ab", "/a/c:/d"]


def test_what_apptainer_would_split_is_refused() -> None:
    with pytest.raises(ImageError, match="splits binds at commas"):
        replace(MI355X, binds=("/a,b",))
    with pytest.raises(ImageError, match="absolute"):
        replace(MI355X, image="agentrl.sif")


def test_links_out_of_a_model_folder_are_followed(odd_path: Path) -> None:
    blobs, model = odd_path / "blobs", odd_path / "snapshots" / "1"
    blobs.mkdir()
    model.mkdir(parents=True)
    (blobs / "f").write_text("")
    (model / "model.safetensors").symlink_to("../../blobs/f")
    (model / "near").symlink_to("model.safetensors")
    assert link_targets(model) == [str(blobs)]
