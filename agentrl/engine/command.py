"""The command line of one engine process. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """What one start of one engine is about."""

    index: int
    """Number of the engine on its node; also its GPU."""
    weights: Path
    """Folder to load."""
    tokenizer: Path
    """Folder of the starting model: a version's folder has no tokenizer."""
    version: int
    port: int = 0
    """For SGLang; the embedded engine binds a free one and publishes it."""
    ready_file: Path | None = None


def engine_command(config: EngineConfig, options: StartOptions) -> list[str]:
    """Return the argument vector that starts the engine of `config.kind`."""
    build = {"embedded": _embedded, "sglang": _sglang}[config.kind]
    return build(config, options)


def _embedded(config: EngineConfig, options: StartOptions) -> list[str]:
    # -P: no folder of a run may shadow a module
    flags: dict[str, object] = {
        "model": options.weights,
        "weight-version": options.version,
        "port": options.port,
        "max-running": config.max_running,
        "kept": config.max_running,
        "context-length": config.context_length,
        "threads": config.threads,
        "niceness": config.niceness,
        "ready-file": options.ready_file,
    }
    return [sys.executable, "-P", "-m", "agentrl.engine.server", *_pairs(flags), "--watch-stdin"]


def _sglang(config: EngineConfig, options: StartOptions) -> list[str]:
    """`launch_server` is the entry that every supported version has.

    The guard ties the server to our life; without the core dump a faulted server dies at once
    instead of hanging for 75 s with its port open.
    """
    flags: dict[str, object] = {
        "model-path": options.weights,
        "tokenizer-path": options.tokenizer,
        "weight-version": options.version,
        "host": "127.0.0.1",
        "port": options.port,
        "base-gpu-id": options.index,
        "context-length": config.context_length,
        "max-running-requests": config.max_running,
    }
    guard = [sys.executable, "-P", "-m", "agentrl.engine.guard"]
    server = [sys.executable, "-m", "sglang.launch_server"]
    quick_death = ["env", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0"]
    return [*guard, *quick_death, *server, *_pairs(flags), "--enable-metrics"]


def _pairs(flags: dict[str, object]) -> list[str]:
    return [
        part
        for name, value in flags.items()
        if value is not None
        for part in (f"--{name}", str(value))
    ]
