"""`agentrl image`: what is built, what is not built again, and the answer of a check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sif_toys import write_sif

from agentrl.errors import ImageError
from containers import build, definition, sif, wheels
from launch import image


def test_an_image_of_the_same_inputs_is_not_built_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = definition.parse(definition.find("cpu"))
    key = build.inputs_key(made, wheels.ROOT, wheels.sources())
    path = write_sif(tmp_path / "cpu.sif", labels={"agentrl.inputs": key})
    assert image.main(["build", "cpu", "--output", str(path)]) == 0
    said = capsys.readouterr().out
    assert "is up to date" in said
    assert sif.digest(path) in said


@pytest.mark.parametrize("how", ["an argument", "a definition of one's own"])
def test_other_inputs_than_those_of_the_image_are_built(tmp_path: Path, how: str) -> None:
    made = definition.parse(definition.find("sandbox"))
    key = build.inputs_key(made, wheels.ROOT, wheels.sources())
    path = write_sif(tmp_path / "a.sif", labels={"agentrl.inputs": key})
    own = tmp_path / "sandbox.def"
    own.write_text(made.text)
    words = ["sandbox", "--build-arg", "MIRROR=x"] if how == "an argument" else [str(own)]
    given = ["--output", str(path), "--cache", str(tmp_path), "--runtime", "apptainer-none"]
    if how != "an argument":
        given += ["--build-arg", "MIRROR=x"]
    with pytest.raises(ImageError, match="no program 'apptainer-none'"):
        image.main(["build", *words, *given])


def test_a_wrong_name_or_value_is_told_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="there are cpu, cuda, rocm, sandbox"):
        image.main(["build", "rocn"])
    path = tmp_path / "own.def"
    path.write_text("Bootstrap: docker\nFrom: debian:12\n")
    with pytest.raises(ImageError, match="--build-arg X: must read NAME=VALUE"):
        image.main(["build", str(path), "--build-arg", "X", "--output", str(tmp_path / "a.sif")])


def test_a_check_from_outside_enters_the_image_and_returns_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "apptainer"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/words"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = write_sif(tmp_path / "a.sif", labels={"agentrl.gpu": "cuda"})
    assert image.main(["check", str(path), "--json", "--bind", "/scratch"]) == 1
    words = (tmp_path / "words").read_text().splitlines()
    assert "--nv" in words
    assert "--bind=/scratch" in words
    assert any(word.startswith("--home=") for word in words)
    assert words[-5:] == ["python3", "-m", "launch.image", "check", "--json"]


def test_a_truncated_image_is_refused_by_the_check_too(tmp_path: Path) -> None:
    path = write_sif(tmp_path / "a.sif")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ImageError, match="truncated"):
        image.main(["check", str(path)])
