"""Which experts the tokens of a mixture took, as SGLang returns them with a reply.

An engine answers `return_routed_experts` by int32, base64, C order [positions, layers, experts a
token], for the positions from `routed_experts_start_len` up to the one before the last token: that
one's experts are chosen when the token after it is computed. Source: SGLang 0.5.15 to 0.5.23,
srt/managers/scheduler_components/batch_result_processor.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError
from agentrl.hf_shape import read_config, read_shape

Experts = NDArray[np.unsignedinteger[Any]]
"""[positions, layers, experts a token]: the narrowest type that holds a model's numbers."""
NO_EXPERTS: Experts = np.empty((0, 0, 0), np.uint8)
MOST = 1 << 15
"""Experts of a layer that the trainer's 16-bit numbers tell apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelExperts:
    """How many experts a model has, and how many of them a token takes in each layer."""

    layers: int
    count: int
    per_token: int

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.count <= MOST or self.layers < 1:
            raise ConfigError(
                f"{self.layers} layers of {self.count} experts, {self.per_token} of them a token: "
                f"engine.sglang.routed_experts=true needs 1 to {MOST} experts and no more a token "
                "than there are; set false"
            )

    @property
    def kind(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.count < 256 else np.uint16

    @property
    def token_bytes(self) -> int:
        """Of one token's experts, as they are kept."""
        return self.layers * self.per_token * np.dtype(self.kind).itemsize

    def decode(self, data: bytes, rows: int) -> Experts:
        """Return an engine's int32 as [rows, layers, per_token]. Raises ValueError."""
        shape = (rows, self.layers, self.per_token)
        found = np.frombuffer(data, "<i4") if len(data) % 4 == 0 else np.empty(0, "<i4")
        if len(data) != 4 * rows * self.layers * self.per_token:
            raise ValueError(f"{len(data)} bytes of experts, int32 {list(shape)} were due")
        if rows and not 0 <= int(found.min()) <= int(found.max()) < self.count:
            raise ValueError(
                f"experts {found.min()} to {found.max()} of a model that has {self.count}"
            )
        narrow: Experts = found.astype(self.kind)
        kept = narrow.reshape(shape)
        if self.per_token > 1 and (kept[:, :, 0] == kept[:, :, 1]).any():
            raise ValueError(
                "experts that name one twice for a token: zeros, where the engine's memory of them "
                "was never written"
            )
        return kept

    def fit(self, experts: Experts, tokens: int) -> bool:
        """Tell whether `experts` are of this model, for each of `tokens` tokens."""
        if experts.shape != (tokens, self.layers, self.per_token):
            return False
        return not tokens or int(experts.max()) < self.count


def read_experts(folder: Path) -> ModelExperts:
    """Return the experts of the model in `folder`. Raises ConfigError for one that has none."""
    try:
        shape = read_shape(read_config(folder))
    except ConfigError as error:
        raise ConfigError(
            f"engine.sglang.routed_experts=true asks for the model's experts, and {error}; or set "
            "false"
        ) from error
    if not shape.experts:
        raise ConfigError(
            f"engine.sglang.routed_experts=true: {folder} is a {shape.family} without experts; "
            "set false"
        )
    return ModelExperts(layers=shape.layers, count=shape.experts, per_token=shape.experts_per_token)
