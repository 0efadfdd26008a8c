"""Build an image by `apptainer build`: its words come as they are said, its file comes whole.

spython is not used: a failed build gives it None and no error, and it splits commands at blanks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ImageError
from containers import leftovers, sif
from containers.definition import Definition
from containers.following import follow

ADVICE = {
    r"no space left on device|disk quota exceeded": (
        "the disk of --cache or of the image is full: name a larger one by --cache"
    ),
    r"no mapping entry found in /etc/sub[ug]id|fakeroot.*(subuid|mapping)": (
        "your user has no range of subordinate ids: an administrator adds one by "
        "`usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 NAME`, or build on "
        "a machine that has it"
    ),
    r"toomanyrequests|rate limit": (
        "the registry counts downloads by address: wait, or `apptainer registry login`; layers "
        "that came are kept in --cache"
    ),
    r"manifest unknown|404 not found|name unknown": (
        "the registry has no such image any more: see pins.yaml"
    ),
    r"user namespace|clone.*operation not permitted|unshare": (
        "user namespaces are switched off here: build where they are on, `agentrl doctor` tells"
    ),
    r"x509|certificate": "a proxy between here and the registry: give its certificate to Apptainer",
    r"debootstrap.*not found|debootstrap is not in": "install debootstrap, or build where it is",
    r"while unpacking.*|failed to (create|unpack).*xattr|operation not supported": (
        "--cache is on a network disk: name a local one"
    ),
    r"could not find a version|no matching distribution": (
        "pip found no such wheel: its words above name it"
    ),
}
"""What Apptainer and what runs in it say (patterns, any case) → what to do."""

COMPRESSION = "-comp zstd -Xcompression-level 6"
"""Packs and unpacks faster than mksquashfs's own gzip; Linux mounts it since 4.14."""
IMAGE_SHARE = 0.25
"""Of what a build needs on its cache's disk: what the image takes at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One build: from what, to where."""

    definition: Definition
    image: Path
    cache: Path
    """Folder for downloads and for the unpacked image, on a local disk."""
    arguments: dict[str, str]
    """Values of the definition's {{ NAME }}."""
    needs_gb: float
    """Free space that the cache has to have."""
    runtime: str = "apptainer"
    is_root: bool = False

    def __post_init__(self) -> None:
        missing = sorted(self.definition.arguments - set(self.arguments))
        if missing:
            raise ImageError(
                f"{self.definition.path}: needs {', '.join(missing)}; give --build-arg NAME=VALUE"
            )

    @property
    def draft(self) -> Path:
        return self.image.with_name(f".{self.image.name}.{leftovers.stamp()}.tmp")

    @property
    def temporary(self) -> Path:
        """Where the image is unpacked."""
        return self.cache / "tmp" / leftovers.stamp()


def command(build: Build) -> list[str]:
    """Return the words of the build."""
    given = {name: build.arguments[name] for name in sorted(build.definition.arguments)}
    return [
        *(build.runtime, "build", "--force", *(() if build.is_root else ("--fakeroot",))),
        f"--mksquashfs-args={COMPRESSION}",
        *(word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")),
        *(str(build.draft), str(build.definition.path)),
    ]


def environment(build: Build, base: Mapping[str, str]) -> dict[str, str]:
    """Return the build's environment: its disk; a debootstrap that knows it can make no device."""
    temporary = str(build.temporary)
    return {
        **base,
        "APPTAINER_CACHEDIR": str(build.cache / "layers"),
        "APPTAINER_TMPDIR": temporary,
        "SINGULARITY_CACHEDIR": str(build.cache / "layers"),
        "SINGULARITY_TMPDIR": temporary,
        "PATH": f"{base.get('PATH', os.defpath)}:/usr/sbin:/sbin",  # where debootstrap is
        **({} if build.is_root else {"container": "lxc"}),
    }


def run(build: Build, say: Callable[[str], None]) -> sif.Sif:
    """Build the image; return it, read and found whole. Raises ImageError, with what to do.

    say: gets each line of Apptainer's. All of them are in IMAGE.log too.
    """
    check_space(build)
    for path in clear(build):
        say(f"left by a build that was killed, and not removable by us: {path}")
    for folder in (build.temporary, build.cache / "layers", build.image.parent):
        folder.mkdir(parents=True, exist_ok=True)
    log = build.image.with_name(f"{build.image.name}.log")
    try:
        if lines := _follow(build, log, say):
            raise ImageError(
                f"{build.runtime} build of {build.definition.path} failed: "
                f"{' | '.join(reasons(lines)[-3:])}{advice(reasons(lines))}; all it said: {log}"
            )
        sif.read(build.draft)
        _publish(build.draft, build.image)
    finally:
        build.draft.unlink(missing_ok=True)
        leftovers.remove(build.temporary)
    return sif.read(build.image)


def clear(build: Build) -> list[Path]:
    """Remove what builds that were killed left on these disks; return what could not be."""
    drafts = leftovers.clear(build.image.parent, before=f".{build.image.name}.", after=".tmp")
    return [*drafts, *leftovers.clear(build.cache / "tmp")]


def check_space(build: Build) -> None:
    """Raise ImageError where a disk has less free than the build needs."""
    for folder, needs_gb, option in (
        (build.cache, build.needs_gb, "--cache"),
        (build.image.parent, build.needs_gb * IMAGE_SHARE, "--output"),
    ):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free_gb = shutil.disk_usage(there).free / 2**30
        if free_gb < needs_gb:
            raise ImageError(
                f"image build: {folder} has {free_gb:.1f} GiB free and this build needs "
                f"{needs_gb:g}: name another disk by {option}"
            )


def reasons(lines: list[str]) -> list[str]:
    """Return those of a build's lines that say why it failed, else the last ones."""
    return [line for line in lines if re.search(r"FATAL|ERROR|error:|^E: ", line)] or lines[-12:]


def advice(lines: Iterable[str]) -> str:
    """Return what to do about a build that said `lines`; empty where we do not know."""
    text = "\n".join(lines)
    found = (hint for pattern, hint in ADVICE.items() if re.search(pattern, text, re.I))
    return "".join(f"; {hint}" for hint in list(found)[:1])


def inputs_key(
    definition: Definition, root: Path, files: Iterable[Path], given: Iterable[str] = ()
) -> str:
    """Return a digest of all that makes the image, but for what mirrors and registries give.

    files: below `root`, each counted with its name. given: a person's own NAME=VALUE.
    """
    found = hashlib.sha256("\0".join([definition.text, *sorted(given)]).encode())
    for path in sorted(files):
        found.update(f"\0{path.relative_to(root)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def is_current(image: Path, key: str) -> bool:
    """Whether a whole image made of these very inputs lies there."""
    try:
        return sif.read(image).labels.get("agentrl.inputs") == key
    except ImageError:
        return False


def _follow(build: Build, log: Path, say: Callable[[str], None]) -> list[str]:
    """Run the build; return what it said if it failed, nothing else."""
    lines: list[str] = []
    with log.open("w") as file:

        def hear(line: str) -> None:
            lines.append(line)
            print(line, file=file, flush=True)
            say(line)

        try:
            code = follow(command(build), environment(build, os.environ), hear)
        except FileNotFoundError as error:
            raise ImageError(
                f"image build: no program {build.runtime!r} on PATH; install Apptainer (1.2 or "
                "later), load your site's module, or name it by --runtime"
            ) from error
    return (lines or ["no word"]) if code else []


def _publish(draft: Path, image: Path) -> None:
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(image)
    folder = os.open(image.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)
