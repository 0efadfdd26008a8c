"""Which back end a run trains with: made on each of the trainer's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import RunConfig
from agentrl.hf_shape import check_computed, read_config, read_shape
from agentrl.model_fit import layout_of, require_megatron
from agentrl.training.backend import Backend
from agentrl.training.led import Led
from agentrl.training.led import follow as follow_together
from agentrl.training.ranks import World
from agentrl.training.torch_backend import TorchBackend
from agentrl.training.weight_files import WeightFiles, check_weights

if TYPE_CHECKING:
    from agentrl.training.megatron_backend import MegatronBackend


def open_backend(config: RunConfig, world: World) -> Backend:
    """Rank 0: return the back end of `training.backend`, its starting model loaded."""
    if config.training.backend == "torch":
        return TorchBackend(Path(config.model.path), config, world=world)
    return Led(open_megatron(config), world)


def follow(config: RunConfig, world: World) -> None:
    """Any other rank: take part until rank 0 ends."""
    if config.training.backend == "torch":
        TorchBackend(Path(config.model.path), config, world=world).follow()
    else:
        follow_together(open_megatron(config), world, config)


def open_megatron(config: RunConfig) -> MegatronBackend:
    """Return this rank's part.

    Raises ConfigError without a megatron-core that we know, or its layers, for a cut that the model
    does not have, and for weights that are not what its config asks for.
    """
    require_megatron(config.training)
    layout = layout_of(config.training)
    folder = Path(config.model.path)
    told = read_config(folder)
    shape = read_shape(told)
    layout.check(shape)
    check_computed(told)
    check_weights(WeightFiles(folder), shape)
    from agentrl.training.megatron_backend import MegatronBackend  # takes half a minute

    return MegatronBackend(folder, config, layout)
