"""What all roles' processes hand down to their engines and collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from launch.run_dir import create

NAME = "NCCL_CUMEM_ENABLE"
PROGRAM = f"""
import os, sys
from launch.roles import play
def body(*_):
    print(os.environ[{NAME!r}], flush=True)
    return 0
sys.exit(play(sys.argv[2], body, run_dir=sys.argv[1], attempt=1))
"""


@pytest.mark.parametrize(
    ("role", "given", "found"), [("trainer", "", "0"), ("inference", "1", "1")]
)
def test_a_role_finds_nccl_set_as_the_other_does_unless_a_site_says_otherwise(
    odd_path: Path, role: str, given: str, found: str
) -> None:
    run = create(RunConfig(name="r", runs_dir=str(odd_path)), ["test"])
    (run.attempt(1) / "exit").mkdir(parents=True)
    environ = {name: value for name, value in os.environ.items() if name != NAME}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run.path), role],
        env=environ | ({NAME: given} if given else {}),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (found, 0), done.stderr
