"""A run where Slurm keeps accounts: the same life, and a state that outlives squeue's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_run import LabRun

from slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_under_accounting_is_requeued_and_ends(lab_accounting: Lab, odd_path: Path) -> None:
    run = LabRun(lab_accounting, odd_path)
    run.hold(4)
    run.train("training.steps=8")
    run.until_step(3)
    run.lab.run(["scancel", "--batch", "--signal=USR2", run.job])
    last = run.finish()
    assert [line.action for line in run.ledger()] == ["requeue", "done"]
    assert last.step_end == 8
    asked = ["sacct", "--noheader", "--parsable2", f"--jobs={run.job}", "-X"]
    # slurmdbd learns of an end a little later, and of each component by itself
    run.until(lambda: run.lab.run(asked).stdout.count("COMPLETED") == 2, "sacct's answer")
