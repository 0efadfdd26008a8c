from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The unharmed run of two steps, then one case for each place where a run was killed."""
    command = [sys.executable, str(Path(__file__).with_name("killed_trainer.py"))]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("killed"))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1450,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_trainer_killed_at_any_disk_call_resumes_to_the_same_weights(cases):
    unharmed, *killed = cases
    places = {place for case in killed for place, _ in case["killed_at"]}
    for folder in ("weights/version.py", "training/checkpoint.py", "training/intake.py"):
        assert any(folder in place for place in places)
    assert any(len(case["killed_at"]) == 2 for case in killed)
    for case in cases:
        assert case["codes"] == [-signal.SIGKILL] * len(case["killed_at"]) + [0], case
        assert case["weights"] == unharmed["weights"], case
        assert (case["version"], case["done"]) == (2, True), case


def test_a_trainer_killed_at_any_disk_call_accounts_for_every_draw(cases):
    for case in cases:
        assert case["consumed"] == {str(draw): "trained" for draw in range(2)}, case
        assert case["spool"] == 0, case


def test_a_trainer_killed_at_any_disk_call_leaves_no_half_written_folder(cases):
    for case in cases:
        assert case["versions"] == ["LATEST.json", "v000002"], case
        assert case["checkpoints"] == ["LATEST.json", "step-000002"], case
