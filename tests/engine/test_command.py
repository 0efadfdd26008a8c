from __future__ import annotations

import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import EngineConfig, load
from agentrl.config_engine import SglangConfig
from agentrl.engine.capabilities import capabilities
from agentrl.engine.command import StartOptions, engine_command
from agentrl.engine.devices import EngineShare, check_shares, free_ports
from agentrl.errors import ConfigError, LaunchError, VersionError

OPTIONS = StartOptions(
    index=3,
    weights=Path("/w/v000012"),
    tokenizer=Path("/m"),
    version=12,
    port=30003,
    nccl_port=30004,
    served_name="engine-3-5f0c",
)
GOLDEN = Path(__file__).parent / "golden"


def flags(config: EngineConfig, options: StartOptions = OPTIONS) -> str:
    """Return what goes to SGLang, a flag a line."""
    arguments = engine_command(config, options).arguments
    start = arguments.index("sglang.launch_server") + 1
    return " ".join(arguments[start:]).replace(" --", "\n--") + "\n"


FULL = SglangConfig(
    dtype="bfloat16",
    attention_backend="aiter",
    mem_fraction=0.8,
    max_total_tokens=400_000,
    chunked_prefill=8192,
    schedule_policy="lpm",
    graph_batch_sizes=[64, 1, 8],
    prefill_graphs=True,
    deterministic=True,
    random_seed=7,
    hierarchical_cache_gb=64,
    routed_experts=True,
    extra=["--moe-runner-backend", "triton"],
)
CASES = {
    "plain": (EngineConfig(kind="sglang", context_length=4096, max_running=128), OPTIONS),
    "full": (
        EngineConfig(kind="sglang", context_length=4096, gpus_per_engine=2, sglang=FULL),
        replace(OPTIONS, index=1, is_masked=True),
    ),
    "graphs_off": (EngineConfig(kind="sglang"), replace(OPTIONS, graphs=False)),
    "unmasked_pair": (
        EngineConfig(kind="sglang", gpus_per_engine=2),
        replace(OPTIONS, index=1),
    ),
    "cpu": (load("configs/demo.yaml", ["engine=sglang-cpu"]).engine, OPTIONS),
}


@pytest.mark.parametrize("name", CASES)
def test_sglang_gets_these_flags(name: str) -> None:
    assert flags(*CASES[name]) == (GOLDEN / f"sglang_{name}.txt").read_text()


def test_sglang_runs_under_the_guard_and_dies_at_once_when_it_faults() -> None:
    config = EngineConfig(kind="sglang", sglang=SglangConfig(python="/s/bin/python"))
    command = engine_command(config, OPTIONS)
    guard = [sys.executable, "-P", "-m", "agentrl.engine.guard"]
    assert command.arguments[:7] == [*guard, "/s/bin/python", "-m", "sglang.launch_server"]
    assert command.environment["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"


def test_requests_are_capped_by_what_the_cache_holds() -> None:
    config = EngineConfig(
        kind="sglang", context_length=1000, sglang=SglangConfig(max_total_tokens=8192)
    )
    assert "--max-running-requests 8\n" in flags(config)


def test_the_embedded_engine_is_started_by_this_command() -> None:
    assert engine_command(EngineConfig(), OPTIONS).arguments == [
        *(sys.executable, "-P", "-m", "agentrl.engine.server", "--model", "/w/v000012"),
        *("--weight-version", "12", "--port", "30003", "--max-running", "64", "--kept", "64"),
        *("--context-length", "512", "--threads", "1", "--niceness", "0", "--watch-stdin"),
    ]


@pytest.mark.parametrize(
    ("version", "name", "mode"),
    [
        ("0.5.15.post1", "sglang 0.5.15", "abort"),
        ("0.5.19", "sglang 0.5.15", "abort"),
        ("0.5.21.post1", "sglang 0.5.20", "abort"),
        ("0.5.23", "sglang 0.5.22", "retract"),
        ("embedded-1", "embedded", "retract"),
    ],
)
def test_a_version_behaves_as_the_newest_known_one_below_it(
    version: str, name: str, mode: str
) -> None:
    able = capabilities(version)
    assert (able.name, able.pause_mode("retract")) == (name, mode)


@pytest.mark.parametrize("version", ["0.6.0", "0.5.24", "0.0.0.dev12", "main"])
def test_a_version_that_the_table_lacks_is_the_newest_row_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert capabilities(version).name == "sglang 0.5.22"
    assert f"sglang {version} is not in our table" in caplog.text


@pytest.mark.parametrize("version", ["0.5.14", "0.4.9.post2"])
def test_an_engine_too_old_is_refused(version: str) -> None:
    with pytest.raises(VersionError, match=r"must be sglang 0\.5\.15 or newer"):
        capabilities(version)


def test_a_share_replaces_every_mask_of_its_parent() -> None:
    share = EngineShare(gpus=("2",), environment={"CUDA_VISIBLE_DEVICES": "2"})
    parent = {"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1,2", "HOME": "/h"}
    assert share.environ(parent) == {"CUDA_VISIBLE_DEVICES": "2", "HOME": "/h"}
    assert EngineShare().environ(parent) == parent


def test_two_engines_on_one_gpu_are_refused() -> None:
    shares = [EngineShare(gpus=("0", "1")), EngineShare(gpus=("1", "2"))]
    with pytest.raises(ConfigError, match="GPU 1 is given to two engines"):
        check_shares(shares, engines=2, gpus_per_engine=2)


def test_port_ranges_that_meet_and_shares_too_few_are_refused() -> None:
    shares = [EngineShare(ports=range(20000, 20064)), EngineShare(ports=range(20063, 20100))]
    with pytest.raises(ConfigError, match="port 20063 is given to two engines"):
        check_shares(shares, engines=2, gpus_per_engine=1)
    with pytest.raises(ConfigError, match=r"engine.count=3: 2 shares"):
        check_shares(shares, engines=3, gpus_per_engine=1)


def test_a_taken_port_is_passed_over_and_a_taken_range_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = int(held.getsockname()[1])
        with pytest.raises(LaunchError, match="0 of the 1 that an engine needs"):
            free_ports(1, range(port, port + 1))
        assert port not in free_ports(2)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.sglang.extra=[--port,'1']", "that flag is written from other keys"),
        ("engine.sglang.mem_fraction=1.5", "must be 0 to below 1"),
        ("engine.hang_s=0", "must be over 0"),
        ("engine=sglanf", "engine='sglanf': no such preset; near it are sglang"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load("configs/demo.yaml", [override])


def test_a_named_engine_leaves_what_the_run_says_of_engines() -> None:
    config = load("configs/demo.yaml", ["engine=sglang", "engine.count=2"])
    assert (config.engine.kind, config.engine.count) == ("sglang", 2)
