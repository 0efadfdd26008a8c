"""The exec line of a role, by a real Apptainer: what crosses, signals, what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from image_toys import FLAGS, binds, make_skeleton, needs_apptainer
from processes import children

from containers import sif
from containers.entering import Container, enter_script
from slurm.lab_process import wait_for
from slurm.task import MARK

pytestmark = needs_apptainer
LISTENS = """\
import os, signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, "labels.json" in os.listdir("/.singularity.d"), flush=True)
    if number == signal.SIGTERM:
        sys.exit(75)
signal.signal(signal.SIGUSR2, heard)
signal.signal(signal.SIGTERM, heard)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
TELLS = """\
import json, os, signal, sys
held = [name for name in ("SIGUSR2", "SIGTERM")
        if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "held": held,
                  "home": os.listdir(os.path.expanduser("~")), "argv": sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_skeleton(tmp_path_factory.mktemp("image"))


@pytest.fixture
def made(image: Path, odd_path: Path) -> Container:
    return Container(
        image=str(image),
        gpu=sif.read(image).gpu,
        folder=str(odd_path),
        binds=(str(odd_path), *binds()),
        scratch=str(odd_path / "scratch"),
        crossing=("MY_SITE",),
        runtime=shutil.which("apptainer") or "",
        flags=FLAGS,
    )


@contextmanager
def entered(made: Container, mark: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a role's step as the batch script does; at the end nothing with its mark may live."""
    env = {**os.environ, "SLURM_JOB_ID": "7", "MY_SITE": "a b", "HOSTILE": "x", "PYTHONPATH": "/x"}
    with subprocess.Popen(
        ["bash", "-c", enter_script(made, mark), "role", *command],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
    wait_for(lambda: not marked(mark), 30.0, f"the end of {marked(mark)}")


def marked(mark: str) -> list[int]:
    """Return the processes that carry a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(entry.name)] if entry.name.isdigit() and wanted in words else []
    return found


def test_a_role_sees_what_crosses_its_own_folder_and_a_home_on_the_node(made: Container) -> None:
    with entered(made, uuid.uuid4().hex, "python3", "-c", TELLS, "a b", "$x") as process:
        found = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    assert (found["env"]["SLURM_JOB_ID"], found["env"]["MY_SITE"]) == ("7", "a b")
    assert not {"HOSTILE", "PYTHONPATH"} & set(found["env"])
    assert found["env"]["PYTHONNOUSERSITE"] == "1"
    assert (found["cwd"], found["argv"]) == (made.folder, ["a b", "$x"])
    assert set(found["home"]) <= {".fuse"}
    assert found["held"] == ["SIGUSR2", "SIGTERM"]


def test_signals_to_the_step_reach_the_role_and_its_code_comes_back(made: Container) -> None:
    with entered(made, uuid.uuid4().hex, "python3", "-u", "-c", LISTENS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for child in children(process.pid, having="squashfuse_ll"):
            child.send_signal(signal.SIGUSR2)  # as Slurm does to every process of a step
        os.kill(process.pid, signal.SIGUSR2)
        assert process.stdout.readline() == "SIGUSR2 True\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM True\n"
        assert process.wait(timeout=60) == 75


def test_an_image_of_no_use_is_told_by_apptainer_and_leaves_nothing(made: Container) -> None:
    broken = replace(made, binds=(*made.binds, "/no/such/folder"))
    with entered(broken, uuid.uuid4().hex, "true") as process:
        assert process.wait(timeout=60) == 255
