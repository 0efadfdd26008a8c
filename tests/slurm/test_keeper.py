"""The process that keeps a role: what signals do where every process of a step gets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROLE = """
import os, signal, subprocess, sys, time
from launch.signals import StopFlag
from slurm.task import keep

def role():
    print("up", flush=True)
    sys.stdin.readline()  # what comes before it listens is held
    stop = StopFlag().install()
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    while not stop():
        time.sleep(0.02)
    print(stop.cause, child.poll(), flush=True)
    return 75

held = (signal.SIGUSR2, signal.SIGTERM)
sys.exit(keep(role, launcher=os.getppid(), grace_s=5, held=held))
"""

ENDS = """
import os, signal, sys, time
from launch.signals import StopFlag
from slurm.task import keep

class Late:
    def __del__(self):  # with the modules: Python has taken its signal handlers out before
        os.write(1, b"ending\\n")
        time.sleep(1)

def role():
    StopFlag().install()
    sys.modules["late"] = Late()
    return 75

held = (signal.SIGUSR2, signal.SIGTERM)
sys.exit(keep(role, launcher=os.getppid(), grace_s=5, held=held))
"""
"""A role whose Python takes its time to end, as with torch in it on a busy node."""


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[str]]:
    """A role whose `sleep` stands for an engine, in a process group of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", ROLE],
        env=os.environ | {"AGENTRL_ROLE_MARK": f"test-{os.getpid()}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_usr2_to_every_process_asks_the_role_alone(keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    keeper.stdin.write("\n")
    keeper.stdin.flush()
    keeper.stdout.readline()
    os.killpg(keeper.pid, signal.SIGUSR2)
    assert keeper.stdout.readline() == "TERM None\n"
    assert keeper.wait(120) == 75


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_before_the_role_listens_is_not_lost(
    keeper: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert keeper.stdin is not None
    os.kill(keeper.pid, number)
    keeper.stdin.write("\n")
    keeper.stdin.flush()
    assert keeper.wait(120) == 75


def test_a_signal_that_comes_while_a_roles_python_ends_leaves_its_code_alone() -> None:
    env = os.environ | {"AGENTRL_ROLE_MARK": f"test-ends-{os.getpid()}"}
    words = [sys.executable, "-c", ENDS]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGUSR2)
        assert process.wait(120) == 75
