"""doctor and image check: what they say of a machine, and what of it stops a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig, RoleResources
from launch import doctor, doctor_nodes, image_check
from launch.doctor_nodes import Node, Request, collect, judged, look, words_of
from launch.findings import Finding, looked, ok, show

SLURM = "JobRequeue = 1\nSchedulerType = sched/backfill\nProctrackType = proctrack/cgroup\n"
CONFIG = RunConfig(image="/i.sif", runs_dir="/runs", cluster=ClusterConfig(name="x"))


def states(found: object) -> dict[str, str]:
    return {item.name: item.state for item in found}  # type: ignore[attr-defined]


def node(name: str, **facts: object) -> Node:
    known: dict[str, object] = {
        "written": time.time(),
        "image_bytes": 1,
        "digest": "sha256:a",
        "runtime": "apptainer version 1.4.5",
        "enters": "",
        "has_user_namespaces": True,
        "cgroup": "v2",
        "scratch": "/tmp",
        "scratch_free_gb": 9.0,
        "open_files": 4096,
    }
    return Node(name=name, **(known | facts))  # type: ignore[arg-type]


def test_a_cluster_without_backfill_cannot_start_heterogeneous_jobs() -> None:
    found = states(doctor.judged(doctor.parse_config(SLURM.replace("backfill", "builtin"))))
    assert found["scheduler"] == "fail"
    assert states(doctor.judged(doctor.parse_config(SLURM)))["scheduler"] == "ok"


@pytest.mark.parametrize(
    ("version", "state", "word"),
    [
        ("7.2.0-43", "warn", "hipEventQuery"),
        ("7.2.1", "warn", "hipEventQuery"),
        ("7.2.2-9999", "warn", "clr#279"),
        ("7.2.4-70", "ok", ""),
        ("10.0.0", "ok", ""),
    ],
)
def test_rocm_is_judged_by_its_exact_release(version: str, state: str, word: str) -> None:
    found = image_check.rocm_verdict(version)
    assert (found.state, found.found) == (state, version)
    assert word in found.advice


def test_one_failure_sets_the_exit_code_and_json_holds_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> Finding:
        raise OSError("libx.so: cannot open shared object file")

    assert show([ok("a", "b")], as_json=False) == 0
    assert show([ok("a", "b"), *looked("c", broken)], as_json=True, host="h") == 1
    found = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert (found["ok"], found["host"]) == (False, "h")
    assert "libx.so" in found["findings"][1]["found"]


def test_nodes_that_see_another_file_or_cannot_enter_it_are_named() -> None:
    seen = time.time()
    nodes = [node("n1"), node("n2", digest="sha256:b", enters="no apptainer on this node's PATH")]
    found = states(judged([(one, seen) for one in nodes], CONFIG, expected=3))
    assert found == {"nodes": "fail", "n2 image": "fail", "image digests": "fail"}


def test_a_clock_that_runs_ahead_is_seen() -> None:
    ahead = node("n1", written=time.time() + 60)
    found = states(judged([(ahead, time.time())], CONFIG, expected=1))
    assert found["n1 clock"] == "warn"


def test_a_node_tells_what_it_is(tmp_path: Path) -> None:
    request = Request(image="", runtime="apptainer-none", scratch=f"{tmp_path}/$SLURM_X_NONE")
    found = look(request)
    assert found.runtime == ""
    assert found.scratch_free_gb > 0
    assert look(Request(image="/x", runtime="none", scratch="/proc/x")).scratch_free_gb < 0


def test_each_role_is_asked_with_what_its_nodes_need(tmp_path: Path) -> None:
    gpu = RoleResources(partition="p", gpus_per_node=8, extra=["--exclusive"])
    words = words_of(ClusterConfig(name="x", account="a"), gpu, 3, tmp_path)
    assert {"--partition=p", "--gpus-per-node=8", "--account=a", "--exclusive"} <= set(words)
    assert "--nodes=3" in words
    assert not any(word.startswith("--qos") for word in words)


def test_nodes_answers_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    code = doctor_nodes.main([str(_asked(tmp_path))])
    assert code == 0
    assert len(collect(tmp_path, 1)) == 1


def _asked(folder: Path) -> Path:
    import msgspec

    request = Request(image="", runtime="none", scratch=str(folder))
    (folder / "request.json").write_bytes(msgspec.json.encode(request))
    return folder


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config = tmp_path / "c.yaml"
    config.write_text(f"cluster: lab\nruns_dir: {tmp_path}\n")
    assert doctor.main([str(config)]) == 1
    said = capsys.readouterr().out
    assert "not on PATH: sbatch" in said
    assert os.listdir(tmp_path) == ["c.yaml"]
