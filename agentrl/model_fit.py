"""Whether a run's trainer is there and can take its model, told before anything starts.

By config.json and by what is installed alone: neither torch nor Megatron is imported.
"""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

from agentrl.config import RunConfig, TrainingConfig
from agentrl.errors import ConfigError
from agentrl.handoff.replayed import replayed_experts
from agentrl.hf_shape import (
    Layout,
    check_computed,
    read_config,
    read_shape,
    why_unmapped,
    window_of,
)
from agentrl.training.trainer_memory import Held, held

OLDEST, TOO_NEW = (0, 16, 1), (0, 20)
INSTALL = "pip install 'megatron-core>=0.16.1,<0.20'"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names by which a config.json tells how many experts a layer has."""


def check_fit(config: RunConfig) -> None:
    """Raise ConfigError for a model that cannot be cut, balanced or replayed as the run says."""
    folder, training = Path(config.model.path), config.training
    told = read_config(folder)
    if training.backend == "megatron":
        layout_of(training).check(read_shape(told))
        check_computed(told)
    elif training.packing == "packed" and (window := window_of(told)):
        raise ConfigError(
            f"training.packing=packed: {folder} has a sliding window of {window}, and packed rows "
            "attend to whole sequences only; set padded"
        )
    if training.router_balance_coef and not any(told.get(name) for name in COUNTS):
        raise ConfigError(
            f"training.router_balance_coef={training.router_balance_coef}: {folder} is a "
            f"{told.get('model_type')} without experts; set 0"
        )
    replayed_experts(config)
    if config.cluster.trainer.gpu_gb and (why := over_memory(config, trainer_memory(config))):
        raise ConfigError(why)


def over_memory(config: RunConfig, memory: Held | None) -> str:
    """Return why the trainer's GPUs cannot hold the model; '' where they can, or are not known."""
    gpu_gb = config.cluster.trainer.gpu_gb if config.cluster.is_slurm else 0
    if memory is None or not 0 < gpu_gb << 30 < memory.rank_bytes:
        return ""
    return (
        f"{_ranks(config.training)}: a rank holds {_gib(memory)} GiB of weights, gradients and "
        f"optimizer, and cluster.trainer.gpu_gb={gpu_gb}; raise training.ranks, or cut the model "
        "further (training.expert_parallel, tensor_parallel, pipeline_parallel)"
    )


def trainer_memory(config: RunConfig) -> Held | None:
    """Return what a rank on a GPU of its own holds; None for others, and for an unmapped model."""
    training, told = config.training, read_config(Path(config.model.path))
    if training.device == "cpu" or training.share_gpus or why_unmapped(told):
        return None
    return held(read_shape(told), layout_of(training), training)


def memory_line(config: RunConfig, memory: Held | None) -> str:
    """Return in one line what the trainer's GPUs hold; '' where that is not told."""
    if memory is None:
        return ""
    gpu_gb = config.cluster.trainer.gpu_gb
    return (
        f"trainer, {_ranks(config.training)}: {_gib(memory)} GiB"
        + (f" of {gpu_gb}" if gpu_gb else "")
        + f" on each GPU for weights, gradients and optimizer of {memory.parameters / 1e9:.1f} B "
        "parameters; what a step computes with comes on top"
    )


def _gib(memory: Held) -> str:
    return f"{memory.rank_bytes / 2**30:.1f}"


def _ranks(training: TrainingConfig) -> str:
    told = ["backend", "ranks"]
    if training.backend == "megatron":
        told += ["tensor_parallel", "expert_parallel", "pipeline_parallel"]
    return "training." + ", ".join(f"{name}={getattr(training, name)}" for name in told)


def layout_of(training: TrainingConfig) -> Layout:
    """Return how the run cuts a Megatron model."""
    return Layout(
        tp=training.tensor_parallel,
        ep=training.expert_parallel,
        pp=training.pipeline_parallel,
        spec=training.megatron_layers,  # type: ignore[arg-type]  # checked by check_training
    )


def require_megatron(training: TrainingConfig) -> None:
    """Raise ConfigError where Megatron, or what its layers need, is not installed."""
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "training.backend=megatron: megatron-core is not installed where the trainer runs; "
            f"{INSTALL} there, or set training.backend=torch"
        ) from error
    number = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= number < TOO_NEW:
        raise ConfigError(
            f"training.backend=megatron: megatron-core {found} is installed, and the code was "
            f"written against 0.16.1 and newer, below 0.20; {INSTALL}"
        )
    if training.megatron_layers == "te" and not util.find_spec("transformer_engine"):
        raise ConfigError(
            "training.megatron_layers=te: Transformer Engine is not installed where the trainer "
            "runs; install it there, or set training.megatron_layers=local"
        )
