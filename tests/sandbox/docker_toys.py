"""A Docker image made of a root folder, and why there is no Docker here."""

from __future__ import annotations

import functools
import io
import tarfile
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.docker import open_client

IMAGE = "agentrl-test:latest"


@functools.cache
def why_no_docker() -> str:
    """Return why no daemon can be used; empty when one answers."""
    try:
        open_client().close()
    except SandboxUnavailable as error:
        return f"{error} (Debian: `apt-get install docker.io && dockerd &`)"
    return ""


def import_root(root: Path) -> str:
    """Give the daemon an image of `root`; return its reference."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(root, arcname=".")
    name, tag = IMAGE.split(":")
    open_client().api.import_image_from_data(data.getvalue(), repository=name, tag=tag)
    return IMAGE
