"""The wheels that an image is given: this project's own, and for the cpu image all it needs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from agentrl.errors import ImageError
from containers import leftovers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agentrl", "slurm", "containers", "launch", "analysis", "configs")
DRAFT = ".wheels-"
METADATA = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def sources() -> list[Path]:
    """Return every file that the wheel and the cpu image are made of."""
    found = [ROOT / name for name in (*METADATA, "constraints.txt")]
    for name in PACKAGES:
        found += [path for path in (ROOT / name).rglob("*") if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def project_wheel(into: Path) -> Path:
    """Build this checkout's wheel. Raises ImageError, in pip's words."""
    check_checkout()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        copy.mkdir()
        # not in place: what an earlier build left in build/ would go into the wheel
        for name in PACKAGES:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        for name in METADATA:
            shutil.copyfile(ROOT / name, copy / name)
        _pip(["wheel", "--no-deps", "--wheel-dir", str(into), str(copy)])
    return next(into.glob("agentrl_slurm-*.whl"))


def check_checkout() -> None:
    """Raise ImageError unless this runs from a checkout: an installed wheel makes no other."""
    if missing := [name for name in (*METADATA, "constraints.txt") if not (ROOT / name).is_file()]:
        raise ImageError(
            f"image build: {ROOT} has no {', '.join(missing)}: it is no checkout of this project; "
            "run it from one"
        )


def needed_wheels(project: Path, cache: Path, *, python: str) -> Path:
    """Return a folder with a wheel of all that `project` needs, made once for each constraints.txt.

    python: the image's Python, as 3.11; it must be this one's. Raises ImageError.
    """
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own != python:
        raise ImageError(
            f"image build: the image has Python {python} and this is {own}, whose wheels do not "
            f"fit; run `python{python} -m launch.image build …`"
        )
    texts = [(ROOT / name).read_bytes() for name in ("setup.cfg", "constraints.txt")]
    key = hashlib.sha256(b"\0".join([*texts, own.encode()])).hexdigest()[:16]
    folder = cache / f"wheels-{key}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    leftovers.clear(cache, before=DRAFT)
    draft = cache / f"{DRAFT}{leftovers.stamp()}"
    try:
        constraints = ["-c", str(ROOT / "constraints.txt")]
        _pip(["wheel", *constraints, "--wheel-dir", str(draft), str(project)])
        refuse_gpu_builds(draft)
        for path in draft.glob("agentrl_slurm-*.whl"):
            path.unlink()
        _rename(draft, folder)
    finally:
        leftovers.remove(draft)
    return folder


def _rename(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another build was faster
            raise


def refuse_gpu_builds(folder: Path) -> None:
    """Raise ImageError where pip took a torch for GPUs: gigabytes of no use without one."""
    found = sorted(path.name for path in folder.glob("nvidia_*.whl"))
    if found:
        raise ImageError(
            f"image build cpu: pip took a CUDA build of torch ({found[0]} and {len(found) - 1} "
            "more): name an index or folder of CPU builds by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
        )


def _pip(words: list[str]) -> None:
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ImageError(f"pip {words[0]} failed ({done.returncode}): {tail}")
