from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.handoff.publish import publish_json
from agentrl.weights.lease import lease, leased, prune, release


def versions(weights: Path) -> list[int]:
    return sorted(int(name[1:]) for name in os.listdir(weights) if name.startswith("v0"))


def make(weights: Path, count: int, announced: int | None = None) -> Path:
    for version in range(count):
        (weights / f"v{version:06d}").mkdir(parents=True, exist_ok=True)
        (weights / f"v{version:06d}" / "model.safetensors").write_text("x")
    newest = count - 1 if announced is None else announced
    publish_json(weights / "LATEST.json", {"version": newest})
    return weights


def test_pruning_keeps_the_newest(tmp_path):
    weights = make(tmp_path / "w", 5)
    assert prune(weights, 2) == [0, 1, 2]
    assert versions(weights) == [3, 4]


def test_a_leased_version_stays_until_released(odd_path):
    weights = make(odd_path / "w", 4)
    lease(weights, 0, "engine http://a:1/x")
    assert prune(weights, 1) == [1, 2]
    release(weights, 0, "engine http://a:1/x")
    assert prune(weights, 1) == [0]


def test_the_lease_of_a_dead_process_holds_nothing(tmp_path):
    weights = make(tmp_path / "w", 3)
    code = "import sys; from pathlib import Path; from agentrl.weights.lease import lease; "
    code += "lease(Path(sys.argv[1]), 0, 'dead')"
    subprocess.run([sys.executable, "-c", code, str(weights)], check=True)
    assert len(os.listdir(weights / "leases")) == 1
    assert prune(weights, 1) == [0, 1]
    assert os.listdir(weights / "leases") == []


def test_a_lease_from_another_host_holds_for_an_hour(tmp_path):
    weights = make(tmp_path / "w", 3)
    path = lease(weights, 0, "far")
    record = json.loads(path.read_text())
    publish_json(path, {**record, "host": "another-host", "pid": 1})
    assert leased(weights) == {0}
    past = time.time() - 3700
    os.utime(path, (past, past))
    assert leased(weights) == set()


def test_leasing_a_pruned_version_is_an_error(tmp_path):
    weights = make(tmp_path / "w", 3)
    prune(weights, 1)
    with pytest.raises(RecordError, match="it was pruned"):
        lease(weights, 0, "late")
    assert leased(weights) == set()


def test_versions_newer_than_the_announced_one_are_superseded(tmp_path):
    weights = make(tmp_path / "w", 6, announced=3)
    assert prune(weights, 2) == [0, 1, 4, 5]
    assert versions(weights) == [2, 3]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(1, 6),
    keep=st.integers(1, 4),
    held=st.sets(st.integers(0, 5)),
    announced=st.integers(0, 5),
)
def test_pruning_never_takes_the_announced_or_a_leased_version(
    tmp_path_factory, count, keep, held, announced
):
    announced = min(announced, count - 1)
    weights = make(tmp_path_factory.mktemp("w"), count, announced)
    held = {version for version in held if version < count}
    for version in held:
        lease(weights, version, "x")
    prune(weights, keep)
    assert {announced, *held} <= set(versions(weights))
