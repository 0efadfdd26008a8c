"""An image of empty folders for a real Apptainer: its programs are this machine's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_APPTAINER = (
    "apptainer is not on PATH: `sh configs/install_apptainer.sh` (Debian, root), "
    "`dnf install apptainer` (EPEL) or `conda install -c conda-forge apptainer`"
)
SKELETON = """\
Bootstrap: localimage
From: {root}

%labels
    agentrl.gpu none

%environment
    export PATH={bin}:/usr/bin:/bin
"""
FLAGS = ("--userns",)
"""Root without CAP_SYS_RESOURCE, as in many virtual machines, has no other way."""
needs_apptainer = [
    pytest.mark.skipif(shutil.which("apptainer") is None, reason=NO_APPTAINER),
    pytest.mark.skipif(not Path("/lib").is_symlink(), reason="needs a merged /usr, as Debian 12's"),
]


def make_skeleton(folder: Path) -> Path:
    """Build the image; skips, in Apptainer's words, where it cannot."""
    root = folder / "root"
    for name in ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "localtime"):
        (root / "etc" / name).touch()
    definition = folder / "skeleton.def"
    definition.write_text(SKELETON.format(root=root, bin=Path(sys.prefix) / "bin"))
    made = folder / "skeleton.sif"
    words = ["apptainer", "build", str(made), str(definition)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"apptainer builds no image here: {done.stderr.strip()[-300:]}")
    return made


def binds() -> list[str]:
    """Return the folders of this machine that the skeleton's programs are in."""
    needed = ["/usr", str(ROOT), sys.prefix, sys.base_prefix, "/etc/alternatives"]
    return [path for path in dict.fromkeys(needed) if Path(path).is_dir()]
