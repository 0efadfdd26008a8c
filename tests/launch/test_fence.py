"""A role of a launch attempt that its run has left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.errors import LaunchError
from launch.fence import Fence, successor
from launch.run_dir import RunDir, begin_attempt, create

LIMIT_S = 120.0
HELD = """
import sys, time
from launch.fence import Fence
from launch.run_dir import RunDir
with Fence(RunDir.open(sys.argv[1]), 1):
    print("in", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(odd_path: Path) -> RunDir:
    made = create(RunConfig(name="r", runs_dir=str(odd_path)), ["test"])
    assert begin_attempt(made, ["test"]) == 1
    return made


@pytest.fixture
def role(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """A process that is within the fence of attempt 1."""
    words = [sys.executable, "-c", HELD, str(run.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_a_role_is_killed_once_a_later_attempt_has_begun(
    run: RunDir, role: subprocess.Popen[str]
) -> None:
    run.attempt(2).mkdir()
    assert role.wait(LIMIT_S) == -signal.SIGKILL


def test_a_role_that_starts_after_a_later_attempt_is_refused(run: RunDir) -> None:
    run.attempt(2).mkdir()
    with pytest.raises(LaunchError, match="attempt 2 has begun since"), Fence(run, 1):
        pass


def test_the_newest_attempt_is_left_alone_and_its_fence_ends_with_the_block(run: RunDir) -> None:
    run.attempt(2).mkdir()
    with Fence(run, 2):
        assert successor(run, 2) == 0
    assert "fence" not in [thread.name for thread in threading.enumerate()]
