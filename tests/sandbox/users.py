"""Running a program as an ordinary user, which only root can do."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user; the rest of the suite is the test"
)


def as_nobody(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program as an ordinary user; skip where that cannot be."""
    for python in (sys.executable, "/usr/bin/python3"):
        if _run(python, "import agentrl.config").returncode == 0:
            return _run(python, program, *arguments)
    pytest.skip("no Python here can import the project as another user")


def _run(python: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    site = sysconfig.get_path("purelib")
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python]
    return subprocess.run(
        [*words, "-c", program, *arguments],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{Path(__file__).parents[2]}:{site}"},
        capture_output=True,
        text=True,
        check=False,
    )
