"""Whether a run's trainer can take its model: told by config.json alone, before anything starts."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig, TrainingConfig
from agentrl.errors import ConfigError
from agentrl.handoff.replayed import replayed_experts
from agentrl.hf_shape import Layout, read_config, read_shape

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names by which a config.json tells how many experts a layer has."""


def check_fit(config: RunConfig) -> None:
    """Raise ConfigError for a model that cannot be cut, balanced or replayed as the run says."""
    folder, training = Path(config.model.path), config.training
    told = read_config(folder)
    if training.backend == "megatron":
        layout_of(training).check(read_shape(told))
    if training.router_balance_coef and not any(told.get(name) for name in COUNTS):
        raise ConfigError(
            f"training.router_balance_coef={training.router_balance_coef}: {folder} is a "
            f"{told.get('model_type')} without experts; set 0"
        )
    replayed_experts(config)


def layout_of(training: TrainingConfig) -> Layout:
    """Return how the run cuts a Megatron model."""
    return Layout(
        tp=training.tensor_parallel,
        ep=training.expert_parallel,
        pp=training.pipeline_parallel,
        spec=training.megatron_layers,  # type: ignore[arg-type]  # checked by check_training
    )
