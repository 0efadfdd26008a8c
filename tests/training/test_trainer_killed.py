from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """One case for each disk call of a run of three steps; the last case is the unharmed run."""
    command = [sys.executable, str(Path(__file__).with_name("killed_trainer.py"))]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("killed"))],
        capture_output=True,
        text=True,
        check=True,
        timeout=580,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_killed_at_any_disk_call_resumes_to_the_same_weights(cases):
    *killed, unharmed = cases
    assert not unharmed["killed"]
    assert len(killed) > 60
    for case in cases:
        assert case["code"] == 0, case
        assert case["weights"] == unharmed["weights"], case
        assert (case["version"], case["done"]) == (3, True), case


@pytest.mark.slow
def test_a_trainer_killed_at_any_disk_call_accounts_for_every_draw(cases):
    for case in cases:
        assert case["consumed"] == {str(draw): "trained" for draw in range(3)}, case
        assert case["spool"] == 0, case


@pytest.mark.slow
def test_a_trainer_killed_at_any_disk_call_leaves_no_half_written_folder(cases):
    for case in cases:
        assert case["versions"] == ["LATEST.json", "v000001", "v000002", "v000003"], case
        assert case["checkpoints"] == ["LATEST.json", "step-000003"], case
