"""`agentrl image build NAME|FILE`: build an image. `agentrl image check [IMAGE]`: try it here.

build: NAME is cpu, rocm, cuda or sandbox, FILE a definition file of your own. An ordinary user
with subordinate ids can build; nothing is built where the image at --output has the same inputs.
check: without IMAGE the Python that runs this is looked at, which may be that of an image.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from agentrl.errors import ImageError
from containers import build, definition, following, sif, wheels
from containers.entering import gpu_flags
from launch.command import guard, parser, say
from launch.findings import show
from launch.run_dir import git_commit
from slurm.exit_record import DONE

NEEDS_GB = {"cpu": 6.0, "sandbox": 2.0, "rocm": 120.0, "cuda": 90.0}
"""Free space for layers, unpacked files and the image; rocm's and cuda's are guessed."""
PYTHON_OF = "3.11"
"""Of Debian 12, on which the cpu image stands."""


def main(argv: Sequence[str]) -> int:
    """Build or check; return 0, or 1 where a check failed."""
    arguments = parser("image", __doc__ or "")
    actions = arguments.add_subparsers(metavar="ACTION", required=True)
    making = actions.add_parser("build", help="build an image by Apptainer")
    making.add_argument("name", metavar="NAME|FILE", help="cpu, rocm, cuda, sandbox, or a .def")
    making.add_argument("--output", type=Path, help="default: images/agentrl-NAME.sif")
    making.add_argument("--cache", type=Path, help="local disk for layers and unpacked files")
    making.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    making.add_argument("--runtime", default="apptainer", help="program that builds")
    making.set_defaults(act=_build)
    trying = actions.add_parser("check", help="try all that a role needs, on this node")
    trying.add_argument("image", nargs="?", type=Path, help="enter it first; default: stay here")
    trying.add_argument("--json", action="store_true", help="print one JSON object")
    trying.add_argument("--quick", action="store_true", help="leave out what takes over 10 s")
    trying.add_argument("--runtime", default="apptainer", help="program that enters it")
    trying.add_argument("--bind", action="append", default=[], metavar="PATH")
    trying.add_argument(
        "--flag", action="append", default=[], help="of its exec, as --flag=--userns"
    )
    trying.set_defaults(act=_check)
    given = arguments.parse_args(argv)
    return int(given.act(given))


def _build(given: argparse.Namespace) -> int:
    made = definition.parse(definition.find(given.name))
    name = made.path.stem
    image = (given.output or Path("images", f"agentrl-{name}.sif")).absolute()
    cache = (given.cache or default_cache()).absolute()
    started = time.monotonic()
    wheels.check_checkout()
    key = build.inputs_key(made, wheels.ROOT, wheels.sources(), given.build_arg)
    # what a definition of a person's own takes in by %files is not among these inputs
    if given.name in definition.NAMES and build.is_current(image, key):
        return _done(image, started, "is up to date")
    with tempfile.TemporaryDirectory(prefix="agentrl-context-") as folder:
        context = Path(folder)
        context.chmod(0o755)
        values = {**_arguments(made, context, key), **_given(given.build_arg)}
        if "CONTEXT" in made.arguments:
            say("making wheels")
            is_offline = made.header["bootstrap"] == "debootstrap"
            values["VERSION"] = _fill(context, cache if is_offline else None)
        plan = build.Build(
            definition=made,
            image=image,
            cache=cache,
            arguments=values,
            needs_gb=NEEDS_GB.get(name, 6.0),
            runtime=given.runtime,
            is_root=os.geteuid() == 0,
        )
        say(f"$ {shlex.join(build.command(plan))}")
        build.run(plan, lambda line: say(f"  {line}"))
    return _done(image, started, "built")


def default_cache() -> Path:
    """Return where downloads are kept if no --cache names a disk."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agentrl", "images")


def debian_mirror(suite: str) -> str:
    """Return the mirror that this machine's own apt uses. Raises ImageError where it has none."""
    if shutil.which("apt-get"):
        words = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
        done = subprocess.run(
            [*words, "Identifier: Packages", f"Codename: {suite}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found := done.stdout.split():
            return found[0]
    raise ImageError(
        f"image build: this machine's apt knows no mirror of Debian {suite}; name one by "
        "--build-arg MIRROR=URL"
    )


def _fill(context: Path, cache: Path | None) -> str:
    """Lay post.sh and wheels into the context; return the project's version.

    cache: where the wheels of all that it needs are kept; None: the image's pip gets them.
    """
    shutil.copyfile(definition.FOLDER / "post.sh", context / "post.sh")
    (context / "wheels").mkdir()
    own = wheels.project_wheel(context / "wheels")
    if cache is not None:
        for path in wheels.needed_wheels(own, cache, python=PYTHON_OF).iterdir():
            shutil.copyfile(path, context / "wheels" / path.name)
    return own.name.split("-")[1]


def _arguments(made: definition.Definition, context: Path, key: str) -> dict[str, str]:
    commit = git_commit()
    dirty = "+dirty" if commit.get("is_dirty") else ""
    found = {
        "CONTEXT": str(context),
        "GIT": f"{commit.get('commit', 'unknown')}{dirty}",
        "INPUTS": key,
        "TE_REF": "none",
        "VERSION": version("agentrl-slurm"),
    }
    if "MIRROR" in made.arguments:
        found["MIRROR"] = debian_mirror(made.header.get("osversion", ""))
    return found


def _given(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ImageError(f"--build-arg {pair}: must read NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _done(image: Path, started: float, what: str) -> int:
    size = image.stat().st_size / 2**20
    say(f"{image} {what} in {time.monotonic() - started:.0f} s: {size:.0f} MiB")
    say(f"digest {sif.digest(image)}")
    say(f"$ agentrl image check {image}")
    return DONE


def _check(given: argparse.Namespace) -> int:
    flags = [flag for flag in ("--json", "--quick") if getattr(given, flag[2:])]
    if given.image is None:
        from launch.image_check import findings

        found = findings(is_quick=given.quick)
        return show(found, as_json=given.json, image=os.environ.get(NAME, ""))
    image = sif.read(given.image)
    sif.refuse_foreign(image)
    inside = ["python3", "-m", "launch.image", "check", *flags]
    with tempfile.TemporaryDirectory(prefix="agentrl-home-") as home:
        words = [given.runtime, "exec", "--cleanenv", *gpu_flags(image.gpu), *given.flag]
        words += ["--no-mount=home,cwd", f"--home={home}", "--pwd=/tmp"]
        words += ["--env=PYTHONNOUSERSITE=1", *(f"--bind={bind}" for bind in given.bind)]
        try:
            return following.run([*words, str(given.image), *inside])
        except FileNotFoundError as error:
            raise ImageError(f"image check: no program {given.runtime!r} on PATH") from error


NAME = "APPTAINER_CONTAINER"
"""Apptainer's own variable: the image that a process is in."""

if __name__ == "__main__":
    sys.exit(guard(main))
