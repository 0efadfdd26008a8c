"""The definition files that ship: parsed, and held to the table of what they take in."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path

import pytest

from agentrl.errors import ImageError
from containers import definition
from containers.definition import FOLDER, NAMES, complaints, find, parse, pins


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong_with_what_ships(name: str) -> None:
    assert complaints(parse(find(name)), pins()) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_takes_every_post_section(name: str) -> None:
    body = parse(find(name)).sections["post"]
    assert subprocess.run(["sh", "-n"], input=body, text=True, check=False).returncode == 0


def test_the_shell_takes_what_all_images_do_after_their_base() -> None:
    assert subprocess.run(["sh", "-n", str(FOLDER / "post.sh")], check=False).returncode == 0


@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_a_digest_that_nobody_vouched_for_is_seen(name: str) -> None:
    table = copy.deepcopy(pins())
    table["bases"][name]["digest"] = "sha256:" + "0" * 64
    assert "not a NAME@sha256:… of pins.yaml" in complaints(parse(find(name)), table)[0]


def test_a_version_that_differs_from_the_table_is_seen() -> None:
    table = copy.deepcopy(pins())
    table["packages"]["megatron-core"]["version"] = "0.17.0"
    assert complaints(parse(find("rocm")), table) == ["megatron-core==0.16.1: pins.yaml has 0.17.0"]


def test_what_would_build_another_thing_than_it_says_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.def"
    text = find("cpu").read_text().replace("set -eu", "").replace("{{ GIT }}", "{{ GTI }}")
    path.write_text(text.replace("bookworm", "buster").replace("agentrl.gpu none", ""))
    found = "\n".join(complaints(parse(path), pins()))
    for part in ("buster", "agentrl.gpu", "GTI", "set -eu"):
        assert part in found


def test_every_pin_has_a_reason_and_says_where_it_is_from() -> None:
    for base in pins()["bases"].values():
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", base["digest"])
        assert base["why"]
        assert base["source"]


def test_rocm_is_past_the_releases_that_fault() -> None:
    version = tuple(map(int, pins()["bases"]["rocm"]["holds"]["rocm"].split(".")))
    assert version >= (7, 2, 2)


def test_a_name_that_is_no_definition_tells_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cpu, cuda, rocm, sandbox"):
        find("rcom")
    (tmp_path / "x.def").write_text("hello")
    with pytest.raises(ImageError, match="no `Bootstrap:` line"):
        parse(definition.find(str(tmp_path / "x.def")))
