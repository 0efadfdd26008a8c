"""What rollout asks of engines; the HTTP client is in client.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from agentrl.engine.experts import Experts

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of one sequence were sampled by `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    experts_from: int = 0
    """First position of the sequence whose experts the caller lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One reply. Aborted parts are already joined by the client: all tokens are here."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, at the sampling temperature, one a token."""
    versions: tuple[VersionSpan, ...]
    """Spans over token_ids, in order, without a gap."""
    finish: Finish
    cached_tokens: int
    engine: str
    """Address of the engine that answered last."""
    experts: Experts | None = field(default=None, compare=False)
    """[n, layers, experts a token] of the positions from `experts_from` to the one before the last
    token, or of fewer where the reply ends by an abort; None: not asked for."""


class Engine(Protocol):
    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        """Sample a reply; calls with the same `trajectory` stick to one engine while it lives.

        `input_ids` is lent for the call: it is the caller's growing buffer, so an engine neither
        changes it nor keeps it. Raises EngineLost once the retry budget is spent.
        """
