from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.config import EngineConfig
from agentrl.engine.capabilities import capabilities
from agentrl.engine.command import StartOptions, engine_command
from agentrl.errors import VersionError

OPTIONS = StartOptions(
    index=3, weights=Path("/w/v000012"), tokenizer=Path("/m"), version=12, port=30003
)


def test_sglang_is_started_by_this_command() -> None:
    config = EngineConfig(kind="sglang", context_length=4096, max_running=128)
    assert engine_command(config, OPTIONS) == [
        *(sys.executable, "-P", "-m", "agentrl.engine.guard"),
        *("env", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0"),
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", "/w/v000012", "--tokenizer-path", "/m", "--weight-version", "12"),
        *("--host", "127.0.0.1", "--port", "30003", "--base-gpu-id", "3"),
        *("--context-length", "4096", "--max-running-requests", "128", "--enable-metrics"),
    ]


def test_the_embedded_engine_is_started_by_this_command() -> None:
    assert engine_command(EngineConfig(), OPTIONS) == [
        *(sys.executable, "-P", "-m", "agentrl.engine.server", "--model", "/w/v000012"),
        *("--weight-version", "12", "--port", "30003", "--max-running", "64", "--kept", "64"),
        *("--context-length", "512", "--threads", "1", "--niceness", "0", "--watch-stdin"),
    ]


@pytest.mark.parametrize(
    ("version", "name", "mode"),
    [
        ("0.5.17", "sglang 0.5.17", "abort"),
        ("0.5.19", "sglang 0.5.17", "abort"),
        ("0.5.21.post1", "sglang 0.5.20", "abort"),
        ("0.5.23", "sglang 0.5.22", "retract"),
        ("0.6.0", "sglang 0.5.22", "retract"),
        ("embedded-1", "embedded", "retract"),
    ],
)
def test_a_version_behaves_as_the_newest_known_one_below_it(
    version: str, name: str, mode: str
) -> None:
    able = capabilities(version)
    assert (able.name, able.pause_mode("retract")) == (name, mode)


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9.post2", "unknown"])
def test_an_engine_too_old_is_refused(version: str) -> None:
    with pytest.raises(VersionError, match=r"must be sglang 0\.5\.17 or newer"):
        capabilities(version)
