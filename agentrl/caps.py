"""Every ceiling on the way to the wanted number of trajectories at once, the smallest first. Pure.

All are of one inference node: what each allows, and what one trajectory takes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config import RunConfig
from agentrl.sandbox.limits import (
    FILES_PER_SANDBOX,
    RESERVED_FILES,
    memory_mb_of,
    processes_of,
)

UNBOUNDED = 1 << 62
"""What a limit that is switched off allows."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
PASTS = ("fails", "waits", "may fail")
ASSUMED_MEM_FRACTION = 0.85
"""Of SGLang, near what it takes by itself: it computes its own from the GPU at start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What one node allows; `caps_host.probe` reads it."""

    open_files: int
    """A process's hard limit."""
    processes: int
    """Of this user, or of its control group if that is less."""
    process_ids: int
    namespaces: int
    ports: int
    """Ephemeral ones, for each address that is connected to."""
    memory_mb: int
    scratch_mb: int
    """Free where sandboxes write."""
    run_disk_mb: int
    """Free where the run directory is."""
    inotify: int
    """Instances of one user."""
    fuse_mounts: int
    """Of an ordinary user; root has no bound."""
    loop_devices: int
    gpu_memory_mb: int = 0
    """Of one GPU; 0 when none is seen."""
    is_root: bool = False
    is_scratch_in_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """One ceiling: of `allowed`, `fixed` is gone before the first trajectory, each takes `per`."""

    name: str
    allowed: float
    per: float
    unit: str
    source: str
    """Where the number is from."""
    fix: str
    fixed: float = 0.0
    past: str = "fails"
    """What happens past it: it `fails`, it `waits`, or only the worst case fails, `may fail`."""

    def __post_init__(self) -> None:
        if self.per <= 0 or self.past not in PASTS:
            raise ValueError(
                f"cap {self.name!r} with per={self.per} and past={self.past!r}: must be over 0 and "
                f"one of {', '.join(PASTS)}"
            )

    @property
    def at_once(self) -> int:
        """Trajectories at once that it allows."""
        return max(0, int((self.allowed - self.fixed) // self.per))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What of a model's config.json decides the size of its keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    weights_mb: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], *, weights_mb: int = 0) -> ModelShape:
        """Read a config.json in Hugging Face's words; of a multimodal one its text part."""
        text = config.get("text_config", config)
        heads = text["num_attention_heads"]
        return cls(
            layers=text["num_hidden_layers"],
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
            weights_mb=weights_mb,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values: 98,304 for Qwen3-30B-A3B."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES.get(self.dtype, 2)


def wanted(config: RunConfig) -> int:
    """Return how many trajectories one node is asked to have at once."""
    return config.rollout.concurrency * config.rollout.workers


def find_caps(
    config: RunConfig, *, host: Host | None = None, model: ModelShape | None = None
) -> list[Cap]:
    """Return every cap that can be told, the smallest first.

    host: of an inference node; without it only what the config itself sets. model: for KV tokens.
    """
    found = [*_of_config(config), *_of_kv_cache(config, host, model)]
    if host is not None:
        found += [*_of_host(config, host), *_of_use(config, host), *_of_kind(config, host)]
    return sorted(found, key=lambda cap: (cap.at_once, cap.name))


def shortages(caps: list[Cap], wanted: int) -> list[Cap]:
    """Return the caps past which something fails, and which `wanted` at once would pass."""
    return [cap for cap in caps if cap.past == "fails" and cap.at_once < wanted]


def _of_config(config: RunConfig) -> Iterator[Cap]:
    rollout, training, engine = config.rollout, config.training, config.engine
    yield Cap(
        name="trajectory slots",
        allowed=wanted(config),
        per=1,
        unit="slots",
        source=f"rollout.concurrency={rollout.concurrency} × rollout.workers={rollout.workers}",
        fix="raise rollout.concurrency or rollout.workers",
        past="waits",
    )
    ahead = training.groups_per_step * (1 + rollout.max_staleness)
    yield Cap(
        name="draws ahead of the trainer",
        allowed=ahead * rollout.attempts_per_task / rollout.nodes,
        per=1,
        unit="trajectories",
        source=f"training.groups_per_step={training.groups_per_step} × (1 + rollout.max_staleness="
        f"{rollout.max_staleness}) × rollout.attempts_per_task={rollout.attempts_per_task}"
        f" / rollout.nodes={rollout.nodes}",
        fix="raise training.groups_per_step or rollout.max_staleness",
        past="waits",
    )
    yield Cap(
        name="requests that engines run",
        allowed=engine.count * engine.max_running,
        per=1,
        unit="requests",
        source=f"engine.count={engine.count} × engine.max_running={engine.max_running}",
        fix="raise engine.max_running; more wait their turn",
        past="waits",
    )


def _of_kv_cache(config: RunConfig, host: Host | None, model: ModelShape | None) -> Iterator[Cap]:
    engine, tokens = config.engine, config.agent.tokens_per_trajectory
    source = (
        f"engine.max_running={engine.max_running} × engine.context_length={engine.context_length}"
    )
    total = engine.max_running * engine.context_length
    if engine.kind == "sglang":
        total, source = engine.sglang.max_total_tokens, "engine.sglang.max_total_tokens"
        if not total:
            gpu_mb = (
                host.gpu_memory_mb if host is not None else config.cluster.inference.gpu_gb << 10
            )
            if not gpu_mb or model is None:
                return
            fraction = engine.sglang.mem_fraction or ASSUMED_MEM_FRACTION
            room_mb = gpu_mb * engine.gpus_per_engine * fraction - model.weights_mb
            total = int(room_mb * (1 << 20) / model.kv_bytes)
            source = (
                f"{gpu_mb} MiB a GPU × {fraction:g} − {model.weights_mb} MiB of weights"
                f", {model.kv_bytes} bytes a token"
            )
    yield Cap(
        name="KV cache of the engines",
        allowed=engine.count * total,
        per=tokens,
        unit="tokens",
        source=f"engine.count={engine.count} × {source}",
        fix="more engines, engine.sglang.mem_fraction, or lower agent.tokens_per_trajectory",
        past="waits",
    )


def _of_host(config: RunConfig, host: Host) -> Iterator[Cap]:
    workers = config.rollout.workers
    ready = config.sandbox.warm * workers
    yield Cap(
        name="open files",
        allowed=host.open_files * workers,
        fixed=RESERVED_FILES * workers + FILES_PER_SANDBOX * ready,
        per=FILES_PER_SANDBOX + 1,  # and its connection to an engine
        unit="files",
        source="ulimit -Hn of each worker",
        fix="raise the hard limit: /etc/security/limits.conf, or LimitNOFILE of slurmd",
    )
    for name, allowed, source, fix in (
        (
            "processes",
            host.processes,
            "ulimit -u, pids.max of the control group",
            "nproc in limits.conf, TasksMax of slurmd",
        ),
        ("process ids", host.process_ids, "kernel.pid_max, kernel.threads-max", "sysctl as root"),
    ):
        yield Cap(
            name=name,
            allowed=allowed,
            fixed=workers + config.engine.count + ready * processes_of(config.sandbox.kind),
            per=processes_of(config.sandbox.kind),
            unit="processes",
            source=source,
            fix=fix,
        )
    yield Cap(
        name="ports to the engines",
        allowed=host.ports * config.engine.count,
        per=1,
        unit="ports",
        source="net.ipv4.ip_local_port_range, for each engine",
        fix="sysctl net.ipv4.ip_local_port_range='1024 65535' as root",
    )
    yield Cap(
        name="HTTP connections",
        allowed=UNBOUNDED,
        per=1,
        unit="requests",
        source="to engines aiohttp's limit is off (its own is 100), E2B_MAX_CONNECTIONS (200) is "
        "raised to the need",
        fix="nothing to raise",
        past="waits",
    )
    yield _run_disk(config, host)


def _of_use(config: RunConfig, host: Host) -> Iterator[Cap]:
    """What runs out only if all sandboxes use all that they may; a service's take none of it."""
    sandbox = config.sandbox
    if sandbox.kind == "e2b":
        return
    memory_mb = memory_mb_of(sandbox, is_scratch_in_memory=host.is_scratch_in_memory)
    where = "scratch is in memory too" if host.is_scratch_in_memory else "scratch is on a disk"
    yield Cap(
        name="memory, if all fill theirs",
        allowed=host.memory_mb,
        per=memory_mb,
        unit="MiB",
        source=f"what sandbox.total_memory_mb and disk_mb allow one; free now; {where}",
        fix="lower them, or rely on sandboxes that use less; the kernel kills at the real end",
        fixed=memory_mb * sandbox.warm * config.rollout.workers,
        past="may fail",
    )
    yield Cap(
        name="inotify, if all watch files",
        allowed=host.inotify,
        per=1,
        unit="instances",
        source="fs.inotify.max_user_instances; for commands, nothing of ours takes one",
        fix="sysctl fs.inotify.max_user_instances=… as root",
        past="may fail",
    )


def _run_disk(config: RunConfig, host: Host) -> Cap:
    """A finished trajectory waits in the spool: 16 bytes a token, and its messages as text."""
    return Cap(
        name="disk of the run directory",
        allowed=host.run_disk_mb,
        per=max(1e-3, config.agent.tokens_per_trajectory * 24 / (1 << 20)),
        unit="MiB",
        source="free where runs_dir is; checkpoints and versions come on top",
        fix="another runs_dir, or a lower training.keep_checkpoints",
    )


def _of_kind(config: RunConfig, host: Host) -> Iterator[Cap]:
    """What only one kind of sandbox takes."""
    kind = config.sandbox.kind
    if kind in ("bubblewrap", "apptainer"):
        yield Cap(
            name="user namespaces",
            allowed=host.namespaces,
            per=1,
            unit="namespaces",
            source="user.max_user_namespaces",
            fix="sysctl user.max_user_namespaces=… as root",
        )
    if kind in ("process", "apptainer"):
        yield Cap(
            name="scratch disk, if all fill theirs",
            allowed=host.scratch_mb,
            per=config.sandbox.disk_mb,
            unit="MiB",
            source="free where sandboxes write; sandbox.disk_mb each",
            fix="a larger scratch, or a lower sandbox.disk_mb",
            past="may fail",
        )
    if kind == "docker":
        yield Cap(
            name="Docker's networks",
            allowed=UNBOUNDED,
            per=1,
            unit="networks",
            source="none is made, sandboxes have --network none; a daemon has about 31 to give",
            fix="nothing to raise",
        )
    if kind == "apptainer":
        yield Cap(
            name="loop devices" if host.is_root else "FUSE mounts",
            allowed=host.loop_devices if host.is_root else host.fuse_mounts,
            per=1 if host.is_root else 2,
            unit="devices" if host.is_root else "mounts",
            source="max_loop of the module `loop`" if host.is_root else "mount_max of fuse.conf",
            fix="modprobe loop max_loop=…" if host.is_root else "mount_max in /etc/fuse.conf",
        )
