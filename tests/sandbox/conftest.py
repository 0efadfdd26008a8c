"""An image in a folder with an awkward name, and a box over it of each kind of sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import APPTAINER, BUBBLEWRAP, DOCKER, E2B, PROCESS, Box
from docker_toys import import_root
from roots import make_root


@pytest.fixture
def image(odd_path: Path) -> Path:
    """An image whose testbed has a file, a folder with a file, and a link."""
    testbed = odd_path / "image" / "testbed"
    (testbed / "pkg").mkdir(parents=True)
    (testbed / "a.txt").write_text("one\n")
    (testbed / "pkg" / "mod.py").write_text("x = 1\n")
    (testbed / "link").symlink_to("a.txt")
    return odd_path / "image"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach: pytest's own are for their owner alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture(params=[BUBBLEWRAP, APPTAINER, DOCKER, E2B, PROCESS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def root_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked root folder for containers, made of this host's own programs."""
    return make_root(tmp_path_factory.mktemp("environment") / "root")


@pytest.fixture(scope="session")
def apptainer_root(root_folder: Path) -> Path:
    """The same, where Apptainer with hardly a flag can run it: elsewhere nothing of ours could."""
    flags = ["--userns"] if os.geteuid() == 0 else []
    words = ["apptainer", "exec", *flags, "--pwd", "/", str(root_folder), "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"apptainer runs no container here: {done.stderr.strip()}")
    return root_folder


@pytest.fixture(scope="session")
def docker_image(root_folder: Path) -> str:
    return import_root(root_folder)


def environment_for(kind: str, request: pytest.FixtureRequest) -> str:
    """Return what sandboxes of `kind` start from."""
    fixture = {"apptainer": "apptainer_root", "docker": "docker_image"}.get(kind)
    return str(request.getfixturevalue(fixture)) if fixture else "any-template"


@pytest.fixture
def box(kind: str, image: Path, leases: Path, request: pytest.FixtureRequest) -> Box:
    return Box(kind, image, leases, environment_for(kind, request))


@pytest.fixture
def bubble(image: Path, leases: Path) -> Box:
    """What is bubblewrap's alone."""
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is missing")
    return Box("bubblewrap", image, leases)


@pytest.fixture(params=[BUBBLEWRAP, APPTAINER, DOCKER])
def sealed(image: Path, leases: Path, request: pytest.FixtureRequest) -> Box:
    """A kind that isolates from this host."""
    return Box(request.param, image, leases, environment_for(request.param, request))
