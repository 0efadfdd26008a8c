"""Which experts a run's groups carry, where it replays routing, and whether they can be."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.engine.experts import ModelExperts, read_experts
from agentrl.errors import ConfigError
from agentrl.handoff.socket_wire import MAX_BYTES

LARGEST = {"files": (1 << 31) - 1, "socket": MAX_BYTES}
"""Bytes of a group's experts: Parquet counts a page's in 32 bits."""


def replayed_experts(config: RunConfig) -> ModelExperts | None:
    """Return the experts of a run's model, where it replays routing.

    Raises ConfigError for a model without any, and where a group could not be handed on with them.
    """
    if not config.engine.sglang.routed_experts:
        return None
    found = read_experts(Path(config.model.path))
    attempts, tokens = config.rollout.attempts_per_task, config.agent.tokens_per_trajectory
    size, most = attempts * tokens * found.token_bytes, LARGEST[config.handoff]
    if size > most:
        raise ConfigError(
            f"engine.sglang.routed_experts=true: {found.token_bytes} bytes a token make a group of "
            f"rollout.attempts_per_task={attempts} times agent.tokens_per_trajectory={tokens} "
            f"{size} bytes, and handoff={config.handoff} takes {most}; lower one of both, or set "
            "false"
        )
    return found
