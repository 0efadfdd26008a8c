"""The smallest cap of a run, told before it starts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.caps import UNBOUNDED, Cap, Host, ModelShape, find_caps, shortages, wanted
from agentrl.caps_host import cgroup_limit, file_system, parse_gpu_memory, probe
from agentrl.caps_proof import hold, hold_sandboxes
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from launch import plan

HOST = Host(
    open_files=1 << 20,
    processes=30_000,
    process_ids=32_768,
    namespaces=15_000,
    ports=28_232,
    memory_mb=1 << 20,
    scratch_mb=100 << 10,
    run_disk_mb=1 << 20,
    inotify=1 << 20,
    fuse_mounts=1000,
    loop_devices=UNBOUNDED,
)
QWEN3_30B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "torch_dtype": "bfloat16",
}


def config(concurrency: int = 128, **training: int) -> RunConfig:
    made = RunConfig()
    made.rollout.concurrency = concurrency
    made.training.groups_per_step = training.get("groups_per_step", 1000)
    made.engine.max_running = 4096
    return made


def first(made: RunConfig, host: Host = HOST) -> Cap:
    return find_caps(made, host=host)[0]


def at_once(made: RunConfig, name: str, host: Host = HOST) -> int:
    return next(cap.at_once for cap in find_caps(made, host=host) if cap.name == name)


def test_a_token_of_qwen3_30b_takes_96_kib_of_the_cache() -> None:
    assert ModelShape.of(QWEN3_30B).kv_bytes == 96 << 10
    assert ModelShape.of({"text_config": QWEN3_30B}).kv_bytes == 96 << 10


def test_a_run_that_nothing_bounds_is_as_large_as_its_slots() -> None:
    assert (first(config()).name, first(config()).at_once) == ("trajectory slots", 128)


def test_the_trainers_staleness_bounds_what_is_in_flight_over_all_nodes() -> None:
    made = config(groups_per_step=8)
    made.rollout.nodes = 4
    assert first(made).name == "draws ahead of the trainer"
    assert first(made).at_once == 8 * (1 + made.rollout.max_staleness) * 8 // 4


@pytest.mark.parametrize(
    ("name", "change", "number"),
    [
        ("open files", {"open_files": 256 + 3 * 100}, 100),
        ("processes", {"processes": 3 * 90 + 2}, 90),
        ("process ids", {"process_ids": 3 * 80 + 2}, 80),
        ("user namespaces", {"namespaces": 70}, 70),
        ("ports to the engines", {"ports": 60}, 60),
    ],
)
def test_each_limit_of_the_node_is_found_where_it_is_the_smallest(
    name: str, change: dict[str, Any], number: int
) -> None:
    cap = first(config(), replace(HOST, **change))
    assert (cap.name, cap.at_once) == (name, number)
    assert shortages(find_caps(config(), host=replace(HOST, **change)), 128) == [cap]


def test_the_kv_cache_is_reckoned_from_the_gpu_the_weights_and_the_models_shape() -> None:
    made = config()
    made.engine.kind, made.engine.count = "sglang", 8
    made.engine.sglang.mem_fraction = 0.9
    made.agent.tokens_per_trajectory = 32_768
    shape = ModelShape.of(QWEN3_30B, weights_mb=58_000)
    caps = find_caps(made, host=replace(HOST, gpu_memory_mb=143_771), model=shape)
    cap = next(cap for cap in caps if cap.name == "KV cache of the engines")
    tokens = int((143_771 * 0.9 - 58_000) * (1 << 20) / (96 << 10))
    assert cap.at_once == 8 * tokens // 32_768
    assert cap.past == "waits"
    made.cluster.inference.gpu_gb = 64  # a preset's: a login node need not have the GPUs
    (cap,) = [one for one in find_caps(made, model=shape) if "KV" in one.name]
    assert cap.at_once == 8 * int((65_536 * 0.9 - 58_000) * (1 << 20) / (96 << 10)) // 32_768
    made.engine.sglang.max_total_tokens = 65_536
    assert at_once(made, cap.name) == 16


def test_each_kind_of_sandbox_has_caps_of_its_own() -> None:
    made = config()
    made.sandbox.kind = "apptainer"
    assert at_once(made, "FUSE mounts") == 500
    assert at_once(made, "loop devices", replace(HOST, is_root=True, loop_devices=64)) == 64
    made.sandbox.kind = "docker"
    assert at_once(made, "Docker's networks") == UNBOUNDED
    made.sandbox.kind = "e2b"
    names = {cap.name.partition(",")[0] for cap in find_caps(made, host=HOST)}
    assert not names & {"user namespaces", "memory", "inotify", "scratch disk"}


@pytest.mark.parametrize(
    ("kind", "in_memory", "each"),
    [
        ("bubblewrap", False, 1000 + 2 * 100),
        ("apptainer", False, 1000 + 64),
        ("apptainer", True, 1000 + 64 + 100),
        ("process", True, 1000 + 100),
        ("docker", True, 1000 + 256),
    ],
)
def test_memory_counts_what_a_sandbox_of_its_kind_can_really_take(
    kind: str, in_memory: bool, each: int
) -> None:
    made = config()
    made.sandbox.kind, made.sandbox.total_memory_mb, made.sandbox.disk_mb = kind, 1000, 100
    host = replace(HOST, memory_mb=10 * each, is_scratch_in_memory=in_memory)
    assert at_once(made, "memory, if all fill theirs", host) == 10
    made.sandbox.warm = 4
    assert at_once(made, "memory, if all fill theirs", host) == 6


def test_plan_writes_large_numbers_out() -> None:
    made = config()
    made.sandbox.total_memory_mb, made.sandbox.disk_mb = 2500, 60
    told = "\n".join(plan.lines(find_caps(made, host=HOST), 128))
    assert "e+" not in told
    assert "2,620 of 1,048,576 MiB each" in told


def test_without_a_bound_on_the_whole_every_process_may_fill_its_own() -> None:
    made = config()
    made.sandbox.total_memory_mb, made.sandbox.memory_mb, made.sandbox.processes = 0, 100, 5
    made.sandbox.disk_mb = 0
    host = replace(HOST, memory_mb=1000)
    assert at_once(made, "memory, if all fill theirs", host) == 2


def test_commands_that_watch_files_may_run_out_of_inotify() -> None:
    assert at_once(config(), "inotify, if all watch files", replace(HOST, inotify=128)) == 128


def test_an_apptainer_sandbox_counts_the_threads_of_its_monitor() -> None:
    made = config()
    plain = at_once(made, "process ids")
    made.sandbox.kind = "apptainer"
    assert plain == (32_768 - made.rollout.workers - made.engine.count) // 3
    assert at_once(made, "process ids") == (32_768 - made.rollout.workers - made.engine.count) // 14


def test_memory_that_would_only_run_out_if_all_filled_theirs_is_no_shortage() -> None:
    caps = find_caps(config(), host=replace(HOST, memory_mb=3000))
    assert next(cap for cap in caps if cap.name.startswith("memory")).at_once == 1
    assert shortages(caps, 128) == []
    assert "no cap is below that" in plan.verdict(caps, 128)


def test_a_login_node_says_nothing_of_compute_nodes() -> None:
    names = {cap.name for cap in find_caps(config())}
    assert "trajectory slots" in names
    assert not names & {"open files", "processes", "process ids"}


def test_this_machine_is_probed_whole(tmp_path: Path) -> None:
    made = config()
    made.runs_dir = str(tmp_path / "not" / "there")
    made.sandbox.scratch = "/dev/shm"
    found = probe(made)
    assert min(found.open_files, found.processes, found.ports, found.memory_mb) > 0
    assert found.is_scratch_in_memory
    assert min(found.scratch_mb, found.inotify) > 0


def test_the_file_system_of_a_folder_is_that_of_the_mount_nearest_above(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\nc /t nfs - 0\n")
    assert file_system(tmp_path / "x" / "y", mounts=tmp_path / "mounts") == "tmpfs"
    assert file_system(Path("/usr"), mounts=tmp_path / "mounts") == "ext4"


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [("0::/a/b", "", "pids.max"), ("5:cpu,pids:/a/b", "pids", "pids.max")],
)
def test_the_lowest_limit_of_the_control_groups_counts(
    line: str, folder: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/\n{line}\n")
    top = tmp_path / "sys/fs/cgroup" / folder
    (top / "a/b").mkdir(parents=True)
    (top / "a/b" / file).write_text("max\n")
    (top / "a" / file).write_text("400\n")
    (top / file).write_text("900\n")
    assert cgroup_limit("pids", "pids.max", "pids.max", root=tmp_path) == 400


def test_either_vendors_tool_is_read() -> None:
    assert parse_gpu_memory("143771\n143771\n") == [143_771, 143_771]
    amd = '{"card0": {"VRAM Total Memory (B)": "309220868096", "VRAM Total Used Memory (B)": "1"}}'
    assert parse_gpu_memory(amd) == [294_896]


def test_plan_prints_every_cap_and_fails_when_one_would_be_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout:\n  concurrency: 8\n")
    assert plan.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "8 trajectories at once on a node; no cap is below that" in said
    assert "net.ipv4.ip_local_port_range" in said
    assert plan.main([str(path), "rollout.concurrency=100000000"]) == 1
    assert re.search(r"\. Past [\d,]+, .* run out", capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["files", "processes", "connections"])
def test_the_real_number_is_held_at_once(kind: str) -> None:
    assert hold(kind, 40).is_enough


def test_a_number_that_is_not_reached_is_told_in_the_kernels_words() -> None:
    argv = f"ulimit -n 64; exec {sys.executable} -m agentrl.caps_proof files 100"
    done = subprocess.run(["bash", "-c", argv], capture_output=True, check=True)
    held, error = json.loads(done.stdout)
    assert 32 < held < 64
    assert "Too many open files" in error


def test_sandboxes_are_held_at_once() -> None:
    made = config(12)
    made.sandbox.kind = "process"
    found = asyncio.run(hold_sandboxes(made, 12))
    assert (found.held, found.error) == (12, "")
    assert found.is_enough


def test_training_does_not_begin_past_a_cap() -> None:
    with pytest.raises(ConfigError, match=r"100000000 trajectories at once, but .* allow \d+"):
        plan.check_caps(config(100_000_000))


def test_what_is_wanted_is_over_all_workers_of_a_node() -> None:
    made = config(16)
    made.rollout.workers = 8
    assert wanted(made) == 128
