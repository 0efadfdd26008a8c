"""The one command for machines with GPUs, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trainer_on_gpus.sh"


def play(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=120
    )


def test_without_a_part_it_says_which_there_are():
    done = play("false")
    assert done.returncode == 2
    assert all(f"trainer_on_gpus.sh {part}" in done.stdout for part in ("kernels", "step", "two"))


@pytest.mark.parametrize("part", ["kernels", "step", "two"])
def test_each_part_goes_on_after_a_failure_and_counts_them(odd_path, part):
    good, bad = (play(python, part, str(odd_path / python)) for python in ("true", "false"))
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "0 failed")
    logs = list((odd_path / "false").glob("*.log"))
    assert (bad.returncode, bad.stdout.splitlines()[-1]) == (1, f"{len(logs)} failed")
    assert len(logs) == bad.stdout.count("exit 1") >= 3


def test_every_benchmark_that_it_runs_is_there():
    text = SCRIPT.read_text()
    names = re.findall(r"bench \S+ \d+ (\w+)", text) + re.findall(r"-m benchmarks\.(\w+)", text)
    assert set(names) == {"logprob_loss", "experts_layer", "export_push", "moe_step"}
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in names)
