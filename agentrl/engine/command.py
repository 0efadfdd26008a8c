"""The command line of one engine process. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config import EngineConfig
from agentrl.config_engine import SglangConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """What one start of one engine is about."""

    index: int
    """Number of the engine on its node; without a mask also that of its first GPU."""
    weights: Path
    """Folder to load."""
    tokenizer: Path
    """Folder of the starting model: a version's folder has no tokenizer."""
    version: int
    port: int = 0
    """For SGLang; the embedded engine binds a free one and publishes it."""
    nccl_port: int | None = None
    served_name: str = ""
    """By which the server that answers is known to be this one."""
    ready_file: Path | None = None
    is_masked: bool = False
    """The process sees its own GPUs only, and counts them from 0."""
    graphs: bool = True
    """Capture and replay CUDA or HIP graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """An argument vector, and the variables that it wants."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def engine_command(config: EngineConfig, options: StartOptions) -> Command:
    """Return what starts the engine of `config.kind`."""
    build = {"embedded": _embedded, "sglang": _sglang}[config.kind]
    return build(config, options)


def _embedded(config: EngineConfig, options: StartOptions) -> Command:
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
    command = [sys.executable, "-P", "-m", "agentrl.engine.server", *_pairs(flags)]
    return Command(arguments=[*command, "--watch-stdin"])


def _sglang(config: EngineConfig, options: StartOptions) -> Command:
    """`launch_server` is the entry that every supported version has.

    The guard ties the server to our life; without the core dump a faulted server dies at once
    instead of hanging for 75 s with its port open. Source: flags as 0.5.15.post1, 0.5.17 and
    0.5.23 parse them; the aliases without a phase, as --cuda-graph-max-bs, are gone in 0.5.23.
    """
    sglang = config.sglang
    flags: dict[str, object] = {
        "model-path": options.weights,
        "tokenizer-path": options.tokenizer,
        "weight-version": options.version,
        "served-model-name": options.served_name or None,
        "host": "127.0.0.1",
        "port": options.port,
        "nccl-port": options.nccl_port,
        "context-length": config.context_length,
        "max-running-requests": _max_running(config),
        **_devices(config, options),
        "dtype": sglang.dtype or None,
        "mem-fraction-static": sglang.mem_fraction or None,
        "max-total-tokens": sglang.max_total_tokens or None,
        "chunked-prefill-size": sglang.chunked_prefill or None,
        "schedule-policy": sglang.schedule_policy or None,
        "attention-backend": sglang.attention_backend or None,
        "watchdog-timeout": sglang.watchdog_timeout_s,
        "random-seed": None if sglang.random_seed < 0 else sglang.random_seed + options.index,
        **_graphs(config, options),
        "hicache-size": sglang.hierarchical_cache_gb or None,
    }
    switches = {
        "enable-hierarchical-cache": sglang.hierarchical_cache_gb > 0,
        "enable-return-routed-experts": sglang.routed_experts,
        "enable-deterministic-inference": sglang.deterministic,
        "enable-metrics": True,
    }
    guard = [sys.executable, "-P", "-m", "agentrl.engine.guard"]
    server = [sglang.python or sys.executable, "-m", "sglang.launch_server", *_pairs(flags)]
    on = [f"--{name}" for name, wanted in switches.items() if wanted]
    return Command(
        arguments=[*guard, *server, *on, *sglang.extra], environment=_environment(config.sglang)
    )


def _environment(sglang: SglangConfig) -> dict[str, str]:
    ours = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "PYTHONUNBUFFERED": "1"}
    if sglang.device == "cpu":
        ours |= {"SGLANG_USE_CPU_ENGINE": "1"}
    return ours | dict(sglang.environment)


def _devices(config: EngineConfig, options: StartOptions) -> dict[str, object]:
    if config.sglang.device == "cpu":
        return {"device": "cpu"}
    width = config.gpus_per_engine
    return {
        "device": config.sglang.device or None,
        "tp-size": width if width > 1 else None,
        "base-gpu-id": 0 if options.is_masked else options.index * width,
    }


def _graphs(config: EngineConfig, options: StartOptions) -> dict[str, object]:
    if not options.graphs or config.sglang.device == "cpu":
        return {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    sizes = config.sglang.graph_batch_sizes
    return {
        "cuda-graph-bs-decode": sorted(sizes) or None,
        "cuda-graph-max-bs-decode": None if sizes else _max_running(config),
        "cuda-graph-backend-prefill": None if config.sglang.prefill_graphs else "disabled",
    }


def _max_running(config: EngineConfig) -> int:
    """Return how many requests may run: no more than the KV cache holds at full length."""
    budget = config.sglang.max_total_tokens
    if not budget:
        return config.max_running
    return max(1, min(config.max_running, budget // config.context_length))


def _pairs(flags: dict[str, object]) -> list[str]:
    return [
        part
        for name, value in flags.items()
        if value is not None
        for part in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
