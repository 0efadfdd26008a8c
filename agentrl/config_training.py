"""What the trainer's numbers and parallel sizes must satisfy, alone and together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import TrainingConfig

EXPERTS = ("expert_parallel", "pipeline_parallel")
SIZES = ("tensor_parallel", "expert_parallel", "pipeline_parallel", "context_parallel")
LEAST = {
    "clip_high": 0.0,
    "clip_low": 0.0,
    "head_tiles_from": 0,
    "importance_cap": 0.0,
    "kl_coef": 0.0,
    "lr": 0.0,
    "max_trained_staleness": 0,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}
OVER_ZERO = ("checkpoint_timeout_s", "max_grad_norm", "wait_timeout_s")
"""A bound of 0 on gradients stops torch's, and leaves Megatron's as they are."""


def check_training(config: TrainingConfig) -> None:
    """Refuse numbers that train nothing, and a cut over ranks that the back end cannot make."""
    for name, least in LEAST.items():
        if not least <= (found := getattr(config, name)) < math.inf:
            raise ConfigError(f"training.{name}={found}: must be {least:g} or more, and a number")
    for name in OVER_ZERO:
        if not 0 < (found := getattr(config, name)) < math.inf:
            raise ConfigError(f"training.{name}={found}: must be over 0, and a number")
    for name in ("beta1", "beta2"):
        if not 0 <= (found := getattr(config, name)) < 1:
            raise ConfigError(f"training.{name}={found}: Adam's decays are 0 or more and under 1")
    if not math.isfinite(config.entropy_coef):
        raise ConfigError(f"training.entropy_coef={config.entropy_coef}: must be a number")
    for name in SIZES:
        if (size := getattr(config, name)) < 1:
            raise ConfigError(f"training.{name}={size}: must be 1 or more")
        if size > 1 and config.backend == "torch":
            raise ConfigError(
                f"training.{name}={size} with training.backend=torch: FSDP2 cuts over "
                f"training.ranks by itself; set it to 1, or training.backend=megatron"
            )
    if config.kl_coef and config.kl_estimator == "k1":
        raise ConfigError(
            f"training.kl_coef={config.kl_coef} with training.kl_estimator=k1: as a loss its "
            "gradient is 0 in the mean and holds nothing back; set k2 or k3"
        )
    if config.compile and config.recompute == "layers":
        raise ConfigError(
            "training.compile=true with training.recompute=layers: layers that are computed again "
            "run outside of what is compiled, all of them; set compile=false or recompute=none"
        )
    _check_balance(config)
    if config.backend == "megatron":
        _check_megatron(config)


def _check_balance(config: TrainingConfig) -> None:
    asked = f"training.router_balance_coef={config.router_balance_coef}"
    if not 0 <= config.router_balance_coef < math.inf:
        raise ConfigError(f"{asked}: must be 0 or more; sources take 1e-4 to 1e-2")
    if config.router_balance_coef and config.compile:
        raise ConfigError(
            f"{asked} with training.compile=true: a compiled layer's router is not balanced; set "
            "0, or false"
        )
    te = config.backend == "megatron" and config.megatron_layers == "te"
    if config.router_balance_coef and te:
        raise ConfigError(
            f"{asked} with training.megatron_layers=te: Megatron's own layers take no such loss "
            "from us; set training.megatron_layers=local, or 0"
        )


def _check_megatron(config: TrainingConfig) -> None:
    if config.context_parallel > 1:
        raise ConfigError(
            f"training.context_parallel={config.context_parallel}: a sequence is never cut over "
            "ranks here; raise training.tensor_parallel, which cuts its activations too, set "
            "training.recompute=layers, or lower agent.tokens_per_trajectory"
        )
    for names in (("tensor_parallel", "pipeline_parallel"), EXPERTS):
        sizes = {f"training.{name}": getattr(config, name) for name in names}
        if config.ranks % math.prod(sizes.values()):
            told = " times ".join(f"{name}={size}" for name, size in sizes.items())
            raise ConfigError(
                f"{told} does not divide training.ranks={config.ranks}; take sizes that do"
            )
    if config.kl_coef:
        raise ConfigError(
            f"training.kl_coef={config.kl_coef} with training.backend=megatron: it keeps no "
            "starting model to compare with; set 0, or training.backend=torch"
        )
    if config.compile:
        raise ConfigError(
            "training.compile=true with training.backend=megatron: its layers are not compiled; "
            "set false"
        )
    if config.device != "gpu":
        raise ConfigError(
            f"training.backend=megatron with training.device={config.device}: megatron-core "
            "computes on GPUs only; set training.device=gpu, or training.backend=torch"
        )
