"""How engines are started and kept up: the `engine` section. `engine=NAME` lays in a preset."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError

ENGINES = Path(__file__).resolve().parent.parent / "configs" / "engines"
OURS = (
    *("model-path", "tokenizer-path", "weight-version", "host", "port", "nccl-port", "tp-size"),
    *("base-gpu-id", "context-length", "max-running-requests", "enable-metrics"),
    "served-model-name",
)
"""Flags that `engine.sglang.extra` may not set again."""


@dataclass
class SglangConfig:
    python: str = ""
    """Interpreter that has SGLang; empty is the one that runs us."""
    device: str = ""
    """SGLang's --device, as `cpu`; empty leaves it to SGLang."""
    dtype: str = ""
    """Type of the weights, as `bfloat16`; empty is the checkpoint's."""
    attention_backend: str = ""
    """As `triton`, or `aiter` on ROCm; empty leaves it to SGLang."""
    mem_fraction: float = 0.0
    """Share of a GPU's memory for weights and KV cache; 0 leaves it to SGLang."""
    max_total_tokens: int = 0
    """KV cache in tokens; 0 is as many as fit. With it, requests are capped to what it holds."""
    chunked_prefill: int = 0
    """Prompt tokens computed in one pass; 0 leaves it to SGLang."""
    schedule_policy: str = ""
    """Which waiting request is next, as `lpm`; empty is SGLang's own, first come first served."""
    graph_batch_sizes: list[int] = field(default_factory=list)
    """Batch sizes that decode graphs are captured for; empty is SGLang's list up to max_running."""
    prefill_graphs: bool = False
    """Capture graphs for prompts too."""
    watchdog_timeout_s: int = 300
    """SGLang's own watchdog, behind ours; a pause in_place must be shorter."""
    deterministic: bool = False
    """SGLang's kernels that give the same tokens in any batch, at some speed."""
    random_seed: int = -1
    """Seed of engine 0, the next engine's is one more; -1 leaves it to SGLang."""
    hierarchical_cache_gb: int = 0
    """Host memory of one engine for KV that left the GPU; 0 switches that off."""
    routed_experts: bool = False
    """Engines say which experts a token took, and the trainer takes the same: routing replay. Costs
    384 bytes a token in the spool for Qwen3-30B-A3B (48 layers, 8 of 128), 40 times the rest."""
    extra: list[str] = field(default_factory=list)
    """More flags, word for word."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the server's process."""


@dataclass
class EngineConfig:
    kind: str = "embedded"
    """`embedded`: the torch server that ships here. `sglang`: SGLang's."""
    count: int = 1
    """Engines on each inference node."""
    gpus_per_engine: int = 1
    """GPUs of one SGLang engine; over 1 it is tensor-parallel over them."""
    max_running: int = 64
    """Requests that one engine decodes at the same time."""
    context_length: int = 512
    """Longest prompt plus reply that an engine takes, tokens."""
    threads: int = 1
    """Torch threads of one embedded engine."""
    niceness: int = 0
    """Of an embedded engine on shared cores; no effect where sched_autogroup_enabled is 1."""
    start_timeout_s: float = 180.0
    """Longest until a started engine answers, seconds."""
    request_timeout_s: float = 60.0
    """Longest that one request may take, seconds."""
    retries: int = 8
    """Times that one request is sent again after a connection error or a 503."""
    hang_s: float = 10.0
    """An engine with work but without a sign of progress for that long is ended, seconds."""
    gpu_free_s: float = 30.0
    """Longest wait for a killed engine's GPU memory to be free, seconds."""
    max_restarts: int = 3
    """Restarts of one engine, within ten minutes, before the role gives up."""
    graph_faults: int = 3
    """Faults of one engine in half an hour after which it runs without graphs for a while."""
    graphs_off_s: float = 1800.0
    """How long that while is, seconds."""
    suspect_faults: int = 3
    """Faults over two or more engines in half an hour that make their node a suspect."""
    max_drift: float = 8.0
    """Gap to the trainer, in deviations from the other engines', that quarantines an engine."""
    pause_mode: str = "retract"
    """How running requests wait while weights change: `abort`, `in_place` or `retract`."""
    sglang: SglangConfig = field(default_factory=SglangConfig)

    @property
    def is_on_gpus(self) -> bool:
        """Engines hold memory of GPUs, and may replay graphs."""
        return self.kind == "sglang" and self.sglang.device != "cpu"


def check_engine(config: EngineConfig) -> None:
    """Refuse what cannot work with any engine."""
    for key in ("hang_s", "graphs_off_s", "max_drift"):
        if (found := getattr(config, key)) <= 0:
            raise ConfigError(f"engine.{key}={found}: must be over 0")
    for key in ("gpus_per_engine", "graph_faults", "suspect_faults"):
        if (found := getattr(config, key)) < 1:
            raise ConfigError(f"engine.{key}={found}: must be 1 or more")
    sglang = config.sglang
    if not 0 <= sglang.mem_fraction < 1:
        raise ConfigError(f"engine.sglang.mem_fraction={sglang.mem_fraction}: must be 0 to below 1")
    if any(size < 1 for size in sglang.graph_batch_sizes):
        raise ConfigError(
            f"engine.sglang.graph_batch_sizes={sglang.graph_batch_sizes}: each must be 1 or more"
        )
    for flag in sglang.extra:
        name = flag.removeprefix("--").partition("=")[0].replace("_", "-")
        if flag.startswith("--") and name in OURS:
            raise ConfigError(
                f"engine.sglang.extra holds {flag}: that flag is written from other keys of this "
                "config; set those"
            )
    for name in sglang.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"engine.sglang.environment.{name}: no name of a variable")
