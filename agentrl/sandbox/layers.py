"""What an Apptainer sandbox has written, saved as an image folder that others start from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from agentrl.errors import SandboxStartError

LAYERS = {"layer": "layer/upper", "testbed-layer": "testbed/upper"}
"""Folder of a saved image → folder of a sandbox's scratch; beside it the kernel keeps its own, that
nobody may read.
"""


def save(scratch: Path, image: Path, to: Path, *, environment: str, how: str) -> None:
    """Make the image folder `to` of a sandbox over `image` whose processes are stopped.

    how: the way its testbed was laid. Files that were deleted stay so: the markers of layers are
    copied with them. Nobody else may enter `to`: commands may have left programs that are setuid.
    """
    to.mkdir(mode=0o700, parents=True)
    (to / "environment").write_text(f"{environment}\n")
    copy(scratch / LAYERS["layer"], to / "layer")
    if how == "copy":
        copy(scratch / "testbed/upper", to / "testbed")
    elif how == "overlay":
        (to / "testbed").symlink_to((image / "testbed").resolve())
        copy(scratch / "testbed/upper", to / "testbed-layer")


def restore(image: Path, scratch: Path) -> None:
    """Lay a saved image's layers into the scratch of a sandbox that has not started."""
    for name, folder in LAYERS.items():
        if (image / name).is_dir():
            if (scratch / folder).exists():
                shutil.rmtree(scratch / folder)
            copy(image / name, scratch / folder)


def copy(source: Path, target: Path) -> None:
    """Copy a layer with its attributes and the devices that mark deletions."""
    done = subprocess.run(
        ["cp", "-a", "--no-target-directory", str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SandboxStartError(f"layer {source}: {done.stderr.strip()[-300:]}")
