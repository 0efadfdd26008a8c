"""doctor and image check: what they say of a machine, and what of it stops a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig, RoleResources
from launch import doctor, doctor_nodes, image_check
from launch.doctor_node import Node, Request, look
from launch.doctor_nodes import Seen, answered, collect, judged
from launch.findings import Finding, looked, ok, show
from launch.run_dir import settled
from slurm.render import check_bash

SLURM = "JobRequeue = 1\nSchedulerType = sched/backfill\nProctrackType = proctrack/cgroup\n"
CONFIG = RunConfig(image="/i.sif", runs_dir="/runs", cluster=ClusterConfig(name="x"))


def states(found: object) -> dict[str, str]:
    return {item.name: item.state for item in found}  # type: ignore[attr-defined]


def node(name: str, *, at: float = 0.0, echo_s: float = 0.1, **facts: object) -> Seen:
    known: dict[str, object] = {
        "written": 0.0,
        "image_bytes": 1,
        "digest": "sha256:a",
        "runtime": "apptainer version 1.4.5",
        "scratch": "/tmp",
        "scratch_free_gb": 9.0,
        "open_files": 4096,
    }
    made = Node(name=name, **(known | facts))  # type: ignore[arg-type]
    return Seen(node=made, at=at, echo_s=echo_s)


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
    seen = [node("n1"), node("n2", digest="sha256:b", refusal="no apptainer on this node's PATH")]
    found = states(judged(seen, CONFIG))
    assert found == {"n1": "ok", "n2": "ok", "n2 image": "fail", "image digests": "fail"}


def test_an_image_that_the_login_node_sees_otherwise_is_told() -> None:
    assert states(judged([node("n1")], CONFIG, digest="sha256:a"))["image digests"] == "ok"
    assert states(judged([node("n1")], CONFIG, digest="sha256:b"))["image digests"] == "fail"
    assert states(judged([node("n1", digest="")], CONFIG, digest="sha256:a")) == {
        "n1": "ok",
        "image digests": "fail",
    }


@pytest.mark.parametrize(
    ("at", "echo_s", "states_of_clock"),
    [(-60.0, 0.1, ["warn"]), (60.0, 0.1, ["warn"]), (60.0, 65.0, []), (1.0, 0.1, [])],
)
def test_a_clock_is_judged_by_what_the_file_system_took(
    at: float, echo_s: float, states_of_clock: list[str]
) -> None:
    found = states(judged([node("n1", at=at, echo_s=echo_s)], CONFIG))
    assert [state for name, state in found.items() if "clock" in name] == states_of_clock


@pytest.mark.parametrize(("echo_s", "state"), [(0.2, "ok"), (9.0, "warn"), (-1.0, "fail")])
def test_the_shared_file_system_is_judged_by_its_slowest_way_there_and_back(
    echo_s: float, state: str
) -> None:
    found = states(answered([node("n1"), node("n2", echo_s=echo_s)], 2, "", ""))
    assert found == {"nodes": "ok", "shared files": state}


def test_missing_answers_come_with_slurms_word_and_the_jobs_own() -> None:
    first = next(answered([], 4, "job 7 PENDING", "srun: error: Unable to create step"))
    assert first.state == "fail"
    assert first.found == "0 of 4 answered: none; job 7 PENDING; it said: " + (
        "srun: error: Unable to create step"
    )


def test_a_node_tells_what_it_is(tmp_path: Path) -> None:
    found = look(Request(image="", runtime="apptainer-none", scratch=f"{tmp_path}/$UID"))
    assert found.runtime == found.refusal == ""
    assert found.scratch == f"{tmp_path}/{os.getuid()}"
    assert found.scratch_free_gb > 0
    assert look(Request(image="", runtime="none", scratch="/proc/x")).scratch_free_gb < 0


def test_a_node_enters_the_image_by_the_roles_own_line_and_quotes_what_it_said() -> None:
    enters = Request(image="/i", runtime="none", scratch="/tmp", enter='"$@"', imports="import os")
    entered = look(enters)
    assert (entered.refusal, entered.enter_s > 0) == ("", True)
    refused = msgspec.structs.replace(enters, imports="import libx_none")
    assert "No module named 'libx_none'" in look(refused).refusal
    no_bind = msgspec.structs.replace(enters, enter="echo mount source /x missing >&2; exit 255")
    assert look(no_bind).refusal == "exit code 255: mount source /x missing"


def test_the_job_is_the_runs_own_but_short_and_its_script_is_bash(tmp_path: Path) -> None:
    gpu = RoleResources(partition="p", gpus_per_node=8, extra=["--exclusive"])
    cluster = ClusterConfig(
        name="x", account="a", inference=gpu, modules=["apptainer"], environment={"X": "/tmp/$USER"}
    )
    config = settled(RunConfig(name="r", runs_dir=str(tmp_path), cluster=cluster))
    spec = doctor_nodes.job_of(config, tmp_path)
    assert (spec.account, spec.requeue, spec.signal) == ("a", False, "")
    assert spec.time_min < cluster.time_min
    text = doctor_nodes.script_of(spec, tmp_path)
    for part in ("--partition=p", "--gpus-per-node=8", "module load apptainer", "doctor_node"):
        assert part in text
    script = tmp_path / "script.sbatch"
    script.write_text(text)
    check_bash(script)


def test_answers_are_echoed_and_gathered(tmp_path: Path) -> None:
    request = Request(image="", runtime="none", scratch=str(tmp_path))
    (tmp_path / "request.json").write_bytes(msgspec.json.encode(request))
    words = [sys.executable, "-m", "launch.doctor_node", str(tmp_path)]
    ranks = [subprocess.Popen(words, env={**os.environ, "SLURM_PROCID": rank}) for rank in "01"]
    found = collect(tmp_path, 2, lambda: False, wait_s=120)
    assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    assert len(found) == 2
    assert all(0 <= one.echo_s < 60 for one in found)


def test_a_job_that_ends_without_answers_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    assert collect(tmp_path, 1, lambda: True, wait_s=600, late_s=0.2) == []
    assert time.monotonic() - began < 60


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
