"""Building, by an `apptainer` that is a small program: what it is told, and what becomes of it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sif_toys import write_sif

from agentrl.errors import ImageError
from containers import build, definition, wheels
from containers.build import ADVICE, Build, advice, command, environment, inputs_key, is_current

ARGUMENTS = {"CONTEXT": "/c", "MIRROR": "m", "VERSION": "1", "GIT": "g", "INPUTS": "key", "X": "y"}
Fake = Callable[[str], None]


@pytest.fixture
def plan(odd_path: Path) -> Build:
    return Build(
        definition=definition.parse(definition.find("cpu")),
        image=odd_path / "images" / "cpu.sif",
        cache=odd_path / "cache",
        arguments=ARGUMENTS,
        needs_gb=0.001,
    )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts an `apptainer` first on PATH; in its body $image is where the image is wanted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    write_sif(tmp_path / "whole.sif", labels={"agentrl.inputs": "key"})

    def make(body: str) -> None:
        path = folder / "apptainer"
        words = "for image; do case $image in *.tmp) break;; esac; done"
        path.write_text(f'#!/bin/sh\n{words}\nwhole="{tmp_path}/whole.sif"\n{body}\n')
        path.chmod(0o755)

    return make


def test_an_ordinary_user_builds_by_fakeroot_and_gives_only_what_is_asked_for(plan: Build) -> None:
    words = command(plan)
    assert words[:4] == ["apptainer", "build", "--force", "--fakeroot"]
    assert "MIRROR=m" in words
    assert "X=y" not in words
    assert "--fakeroot" not in command(replace(plan, is_root=True))


def test_the_cache_is_on_the_disk_that_was_named(plan: Build) -> None:
    found = environment(plan, {"PATH": "/bin"})
    assert Path(found["APPTAINER_TMPDIR"]).parent == plan.cache / "tmp"
    assert found["APPTAINER_CACHEDIR"] == f"{plan.cache}/layers"
    assert found["container"] == "lxc"
    assert "container" not in environment(replace(plan, is_root=True), {})


def test_a_whole_image_takes_its_name_and_its_words_are_heard(plan: Build, fake: Fake) -> None:
    fake('echo INFO: one; echo INFO: two >&2; cp "$whole" "$image"')
    heard: list[str] = []
    assert build.run(plan, heard.append).labels["agentrl.inputs"] == "key"
    assert heard == ["INFO: one", "INFO: two"]
    assert is_current(plan.image, "key")
    assert not is_current(plan.image, "other")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'FATAL: While making: no space left on device'; exit 255", "name a larger one by"),
        ("echo 'FATAL: no mapping entry found in /etc/subuid for me'; exit 255", "usermod --add"),
        ('head -c 900 "$whole" >"$image"', "ends within its table|truncated"),
        ("true", "no such file"),
    ],
)
def test_a_build_that_fails_says_why_and_keeps_the_image_that_was_there(
    plan: Build, fake: Fake, body: str, said: str
) -> None:
    fake('cp "$whole" "$image"')
    before = build.run(plan, lambda line: None)
    fake(body)
    with pytest.raises(ImageError, match=said):
        build.run(plan, lambda line: None)
    assert is_current(plan.image, "key")
    names = {path.name for path in plan.image.parent.iterdir()}
    assert names == {before.path.name, f"{before.path.name}.log"}


def test_what_a_killed_build_left_is_removed_by_the_next(plan: Build, fake: Fake) -> None:
    with subprocess.Popen(["true"]) as ended:
        dead, alive = (f"{platform.node()}-{pid}" for pid in (ended.pid, os.getppid()))
    for stamp in (dead, alive):
        (plan.cache / "tmp" / stamp / "build-temp-1").mkdir(parents=True)
    plan.image.parent.mkdir()
    plan.image.with_name(f".cpu.sif.{dead}.tmp").touch()
    fake('cp "$whole" "$image"; ls -A "$APPTAINER_TMPDIR/.."')
    heard: list[str] = []
    build.run(plan, heard.append)
    assert dead not in heard
    assert os.listdir(plan.cache / "tmp") == [alive]
    assert sorted(os.listdir(plan.image.parent)) == ["cpu.sif", "cpu.sif.log"]


def test_the_images_own_disk_is_looked_at_too(plan: Build) -> None:
    small = Path("/sys/fs/x.sif")  # a file system without space
    with pytest.raises(ImageError, match="name another disk by --output"):
        build.run(replace(plan, image=small), lambda line: None)


def test_too_little_space_is_told_before_anything_is_done(plan: Build) -> None:
    with pytest.raises(ImageError, match="name another disk by --cache"):
        build.run(replace(plan, needs_gb=1e9), lambda line: None)
    assert not plan.cache.exists()


def test_a_missing_program_is_told_by_name(plan: Build) -> None:
    with pytest.raises(ImageError, match="no program 'apptainer-none' on PATH"):
        build.run(replace(plan, runtime="apptainer-none"), lambda line: None)


def test_a_definition_that_lacks_a_value_is_refused(plan: Build) -> None:
    with pytest.raises(ImageError, match="needs MIRROR; give --build-arg"):
        replace(plan, arguments={key: "" for key in ARGUMENTS if key != "MIRROR"})


def test_every_advice_is_reached_by_words_that_programs_say() -> None:
    heard = (
        "write /tmp/x: no space left on device",
        "could not use fakeroot: no mapping entry found in /etc/subgid for me",
        "toomanyrequests: You have reached your unauthenticated pull rate limit",
        "reading manifest: manifest unknown",
        "Failed to create user namespace: operation not permitted",
        "tls: failed to verify certificate: x509: certificate signed by unknown authority",
        "debootstrap is not in your PATH",
        "while unpacking tmpfs: unpack layer: operation not supported",
        "ERROR: No matching distribution found for torch==2.13.0",
    )
    assert [advice([line])[2:] for line in heard] == list(ADVICE.values())


def test_the_same_files_are_the_same_inputs_wherever_they_lie(tmp_path: Path, plan: Build) -> None:
    keys = []
    for folder, name, text in (("1", "x.py", "a"), ("2", "x.py", "a"), ("3", "y.py", "a")):
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_text(text)
        keys.append(inputs_key(plan.definition, path.parent, [path]))
    assert keys[0] == keys[1] != keys[2]
    assert inputs_key(plan.definition, path.parent, [path], ["TE_REF=1"]) not in keys


def test_every_file_that_ships_counts_as_an_input() -> None:
    names = {str(path.relative_to(wheels.ROOT)) for path in wheels.sources()}
    assert {"containers/post.sh", "constraints.txt", "slurm/templates/run.sh.j2"} <= names
    assert not any("__pycache__" in name for name in names)


def test_a_torch_for_gpus_is_refused_in_the_cpu_image(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0-cp311.whl").touch()
    wheels.refuse_gpu_builds(tmp_path)
    (tmp_path / "nvidia_cublas-13.whl").touch()
    with pytest.raises(ImageError, match="CUDA build of torch"):
        wheels.refuse_gpu_builds(tmp_path)
