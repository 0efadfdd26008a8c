"""Harbor's task folders: task.toml 1.x, instruction.md, environment/, tests/test.sh, solution/.

The Dockerfile cannot be built without Docker. What a sandbox over a folder needs of it is taken:
its last WORKDIR, and the COPY lines that fill that; what its RUN lines do is left undone.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import TaskError
from agentrl.sandbox.base import TESTBED
from agentrl.tasks.paths import within
from agentrl.tasks.task import Task, Verifier
from agentrl.tasks.verifier import rewrite

log = logging.getLogger(__name__)
_TEXT = re.compile(r"\\\n")


class _About(msgspec.Struct, frozen=True):
    name: str = ""


class _Agent(msgspec.Struct, frozen=True):
    network_mode: str = ""


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    workdir: str | None = None
    network_mode: str = ""
    allow_internet: bool | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    environment_mode: str = "shared"


class TaskToml(msgspec.Struct, frozen=True):
    """What of task.toml decides here; other keys are let be, as Harbor lets them be."""

    task: _About = _About()
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    verifier: _Verifier = _Verifier()
    steps: list[Any] = []


def read_harbor(folder: Path, *, is_fresh: bool = True) -> list[Task]:
    """Read the task folders of one split, in the order of their names. Raises TaskError.

    is_fresh: their verifiers judge changes of the repository, in a fresh sandbox.
    """
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise TaskError(
            f"tasks {folder}: no folder there has a task.toml; "
            "put Harbor's task folders of the split there, or set tasks.folder"
        )
    return [read_task(path, is_fresh=is_fresh) for path in found]


def read_task(folder: Path, *, is_fresh: bool = True) -> Task:
    """Read one task folder. Raises TaskError that names the file at fault."""
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise TaskError(f"task {folder}: has no {name}, which Harbor's form demands")
    try:
        about = msgspec.convert(tomllib.loads((folder / "task.toml").read_text()), TaskToml)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise TaskError(f"{folder / 'task.toml'}: not a task of Harbor: {error}") from error
    if about.steps:
        raise TaskError(f"{folder / 'task.toml'}: has steps; tasks of several steps are not taken")
    if about.verifier.environment_mode != "shared":
        raise TaskError(
            f"{folder / 'task.toml'}: its verifier's environment_mode is "
            f"{about.verifier.environment_mode!r}; only `shared`, Harbor's default, is taken"
        )
    workdir = about.environment.workdir or _workdir(folder) or TESTBED
    return Task(
        instance_id=folder.name,
        repo=about.task.name.partition("/")[0] or folder.parent.name,
        problem_statement=rewrite((folder / "instruction.md").read_text(), {workdir: TESTBED}),
        patch="",
        fail_to_pass=(folder.name,),
        pass_to_pass=(),
        image_name=about.environment.docker_image or f"images/{folder.name}",
        test_command="",
        solution=str(folder / "solution") if (folder / "solution/solve.sh").is_file() else "",
        verifier=Verifier(
            folder=str(folder / "tests"),
            timeout_s=about.verifier.timeout_sec,
            env=about.verifier.env,
            workdir=workdir,
            is_fresh=is_fresh,
        ),
        network=_network(about),
        difficulty=str(about.metadata.get("difficulty", "")),
        cluster=folder.name,
    )


def copy_environment(folder: Path, testbed: Path) -> None:
    """Fill `testbed` as the task folder's COPY lines say.

    Raises TaskError where a source is not there, or a path leads out of either folder.
    """
    environment = folder / "environment"
    testbed.mkdir(parents=True)
    for source, target in _copies(environment, _workdir(folder) or TESTBED):
        if not within(environment, source).exists():
            raise TaskError(f"{environment / 'Dockerfile'}: COPY of {source}, which is not there")
        place = within(testbed, target)
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        else:
            place = place / source.name if place.is_dir() or target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def _network(about: TaskToml) -> str:
    """Return what is asked for; `allow_internet` is the word of schemas before 1.4."""
    asked = about.agent.network_mode or about.environment.network_mode
    if not asked and about.environment.allow_internet is not None:
        asked = "public" if about.environment.allow_internet else "no-network"
    return asked


def _lines(environment: Path) -> Iterator[tuple[str, str]]:
    """Yield (instruction, rest) of the Dockerfile."""
    path = environment / "Dockerfile"
    for line in _TEXT.sub(" ", path.read_text()).splitlines() if path.is_file() else ():
        word, _, rest = line.strip().partition(" ")
        if word and not word.startswith("#"):
            yield word.upper(), rest.strip()


def _workdir(folder: Path) -> str:
    found = [rest for word, rest in _lines(folder / "environment") if word == "WORKDIR"]
    return found[-1].strip("\"'").rstrip("/") if found else ""


def _copies(environment: Path, workdir: str) -> Iterator[tuple[Path, str]]:
    """Yield (source, target below the testbed) of the COPY and ADD lines that fill the workdir."""
    for word, rest in _lines(environment):
        if word not in ("COPY", "ADD") or "--from=" in rest:
            continue
        words = shlex.split(rest.strip("[]").replace(",", " "))
        words = [part for part in words if not part.startswith("--")]
        target = words[-1] if words[-1].startswith("/") else f"{workdir}/{words[-1]}"
        if target.rstrip("/.") != workdir and not target.startswith(f"{workdir}/"):
            log.warning("%s: COPY to %s, outside of %s, is left out", environment, target, workdir)
            continue
        for source in words[:-1]:
            yield environment / source.lstrip("/"), target.removeprefix(workdir).lstrip("/")
