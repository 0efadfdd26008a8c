"""A program that is followed: heard line by line, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import children, is_gone

from containers.following import follow
from slurm.lab_process import wait_for

pytestmark = pytest.mark.slow  # process trees

FOLLOWS = """\
import os, signal, sys
from containers.following import follow
for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job, or nohup, ignores them
    signal.signal(number, signal.SIG_DFL)
follow(["sh", "-c", sys.argv[1]], os.environ, lambda line: print(line, flush=True))
"""
TREE = "sleep 1000 & (trap 'echo cleared; exit 1' TERM; sleep 1000 & wait) & echo ready; wait"
"""A build's shape: children that hold the pipe, one of which clears up."""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOWS, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def sleeper(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return children(process.pid, is_deep=True)


def test_both_streams_are_heard_and_the_code_comes_back() -> None:
    heard: list[str] = []
    assert follow(["sh", "-c", "echo a; echo b >&2; exit 7"], os.environ, heard.append) == 7
    assert heard == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_us_alone_leaves_nothing_running(number: signal.Signals) -> None:
    with start(TREE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        tree = sleeper(process)
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    assert len(tree) >= 3
    wait_for(lambda: all(map(is_gone, tree)), 30.0, f"the end of {tree}")


def test_what_hears_ends_the_program_by_failing(tmp_path: Path) -> None:
    def full(line: str) -> None:
        (tmp_path / "pid").write_text(line)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        follow(["sh", "-c", "echo $$; sleep 1000"], os.environ, full)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_signals_are_as_before_once_the_program_has_ended() -> None:
    before = signal.getsignal(signal.SIGTERM)
    follow(["true"], os.environ, print)
    assert signal.getsignal(signal.SIGTERM) == before
