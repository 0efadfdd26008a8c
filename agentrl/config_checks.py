"""What a whole config must satisfy: values that cannot work, alone or together."""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from agentrl.config_cluster import check_cluster
from agentrl.config_engine import check_engine
from agentrl.config_training import check_training
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import RunConfig

CHOICES = {
    "model.init": ("none", "qwen3"),
    "tasks.source": ("repair", "swesmith", "swebench", "r2egym", "harbor"),
    "sandbox.kind": ("bubblewrap", "apptainer", "docker", "e2b", "process"),
    "sandbox.shell": ("bash", "sh"),
    "agent.mode": ("tool", "text"),
    "engine.kind": ("embedded", "sglang"),
    "engine.pause_mode": ("abort", "in_place", "retract"),
    "training.kl_estimator": ("k1", "k2", "k3"),
    "training.aggregation": ("token", "trajectory"),
    "training.backend": ("torch", "megatron"),
    "training.dtype": ("float32", "bfloat16"),
    "training.megatron_layers": ("local", "te"),
    "training.lr_decay": ("none", "linear"),
    "training.packing": ("padded", "packed"),
    "training.device": ("cpu", "gpu"),
    "training.recompute": ("none", "layers"),
    "cluster.layout": ("het", "homogeneous"),
    "cluster.requeue": ("requeue", "chain"),
    "handoff": ("files", "socket"),
    "weights": ("disk", "collective"),
}
POSITIVE = (
    "push_bucket_mb",
    "agent.max_turns",
    "agent.tokens_per_turn",
    "engine.count",
    "engine.max_running",
    "evaluation.attempts",
    "rollout.attempts_per_task",
    "rollout.concurrency",
    "rollout.nodes",
    "rollout.workers",
    "sandbox.max_starts",
    "training.checkpoint_every",
    "training.groups_per_step",
    "training.keep_checkpoints",
    "training.keep_versions",
    "training.micro_batch_tokens",
    "training.ranks",
    "training.steps",
    "training.threads",
)
NESTED = (
    "agent.command_timeout_s",
    "agent.turn_timeout_s",
    "agent.trajectory_timeout_s",
    "rollout.group_timeout_s",
)


def check(config: RunConfig) -> None:
    """Refuse values that cannot work, alone or together."""
    for key, allowed in CHOICES.items():
        if (found := get(config, key)) not in allowed:
            near = difflib.get_close_matches(str(found), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key}={found!r}: must be one of {', '.join(allowed)}{hint}")
    for key in POSITIVE:
        if (found := get(config, key)) < 1:
            raise ConfigError(f"{key}={found}: must be 1 or more")
    for inner, outer in pairwise(NESTED):
        if not 0 < get(config, inner) < get(config, outer):
            raise ConfigError(
                f"timeouts do not nest: {inner}={get(config, inner)} must be over 0 and under "
                f"{outer}={get(config, outer)}; raise the outer or lower the inner"
            )
    if config.agent.tokens_per_trajectory > config.engine.context_length:
        raise ConfigError(
            f"agent.tokens_per_trajectory={config.agent.tokens_per_trajectory} is over "
            f"engine.context_length={config.engine.context_length}; lower the first"
        )
    if not 2 <= config.rollout.min_group <= config.rollout.attempts_per_task:
        raise ConfigError(
            f"rollout.min_group={config.rollout.min_group}: must be 2 to "
            f"rollout.attempts_per_task={config.rollout.attempts_per_task}"
        )
    if config.rollout.max_staleness < 0 or not 0 < config.rollout.max_infra_rate <= 1:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} must be 0 or more and "
            f"rollout.max_infra_rate={config.rollout.max_infra_rate} over 0, at most 1"
        )
    if config.agent.temperature <= 0:
        raise ConfigError(
            f"agent.temperature={config.agent.temperature}: training samples, so must be over 0; "
            "evaluation.temperature=0 is the greedy one"
        )
    _check_replay(config)
    check_cluster(config.cluster)
    check_engine(config.engine)
    check_training(config.training)
    _check_gpus(config)


def _check_gpus(config: RunConfig) -> None:
    """Refuse to queue for nodes with fewer GPUs than their role is going to use.

    Where a role asks for none, the site has a way of its own.
    """
    training, engine, cluster = config.training, config.engine, config.cluster
    asked = {"trainer": cluster.trainer.gpus, "inference": cluster.inference.gpus}
    if cluster.layout == "homogeneous":
        asked = dict.fromkeys(asked, max(asked.values()))
    needed = {}
    if training.device == "gpu" and not training.share_gpus:
        needed["trainer"] = (training.ranks, f"training.ranks={training.ranks}")
    if engine.is_on_gpus:
        shown = f"engine.count={engine.count} of engine.gpus_per_engine={engine.gpus_per_engine}"
        needed["inference"] = (engine.count * engine.gpus_per_engine, shown)
    for role, (gpus, shown) in needed.items():
        if cluster.is_slurm and 0 < asked[role] < gpus:
            raise ConfigError(
                f"{shown}: a node of the {role} has to have {gpus} GPUs and cluster={cluster.name} "
                f"asks for {asked[role]}; raise cluster.{role}.gpus_per_node, or lower the first"
            )


def _check_replay(config: RunConfig) -> None:
    """Refuse routing replay where one of both sides cannot do it."""
    if not config.engine.sglang.routed_experts:
        return
    asked = "engine.sglang.routed_experts=true"
    if config.engine.kind != "sglang":
        raise ConfigError(
            f"{asked} with engine.kind={config.engine.kind}: that engine does not tell which "
            "experts a token took; set false, or take engine=sglang"
        )
    if config.engine.sglang.hierarchical_cache_gb:
        raise ConfigError(
            f"{asked} with engine.sglang.hierarchical_cache_gb="
            f"{config.engine.sglang.hierarchical_cache_gb}: SGLang keeps experts by their place in "
            "GPU memory, and what comes back from the host has another; set one of them off"
        )
    training = config.training
    if training.compile:
        raise ConfigError(
            f"{asked} with training.compile=true: a compiled layer's router is not overruled; set "
            "one of them false"
        )
    if training.backend == "megatron" and training.megatron_layers == "te":
        raise ConfigError(
            f"{asked} with training.megatron_layers=te: Megatron's own layers take no experts from "
            "us; set training.megatron_layers=local, or false"
        )


def get(config: RunConfig, key: str) -> Any:
    """Return the value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
