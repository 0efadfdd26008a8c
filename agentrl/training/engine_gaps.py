"""What each engine said of its own tokens against what the trainer says, over the newest steps.

Like is compared with like: sequences as many versions behind, of the same steps. Where the policy
has moved on, one engine's own past says nothing of its health, so a lone engine is judged by fresh
sequences only.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from agentrl.engine.drift import Gap, outliers
from agentrl.handoff.trajectory import Trajectory

log = logging.getLogger(__name__)
KEPT = 256
"""Sequences of an engine that are remembered, of each age."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a trajectory's tokens were sampled."""

    node: int
    engine: str
    """Its address; empty where several engines took part, or the record does not say."""
    age: int
    """Versions between the trainer and its oldest token."""
    draw: int


@dataclass(kw_only=True, slots=True)
class EngineGaps:
    max_drift: float
    _step: int = 0
    _gaps: dict[int, dict[tuple[int, str], deque[Gap]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    )
    """By age, node and engine."""

    def take(self, origins: Sequence[Origin], gaps: Sequence[float]) -> None:
        """Remember one step's mean |trainer − engine|, nats a token, of each trajectory."""
        self._step += 1
        for origin, nats in zip(origins, gaps, strict=True):
            if origin.engine:
                gap = Gap(step=self._step, draw=origin.draw, nats=nats)
                self._gaps[origin.age][origin.node, origin.engine].append(gap)

    def judge(self) -> dict[int, dict[str, str]]:
        """Return by node the engines that stand out, with the reason; they are forgotten then."""
        found: dict[tuple[int, str], str] = {}
        for age, engines in self._gaps.items():
            if age and len(engines) == 1:
                continue
            named = {f"{node} {engine}": list(gaps) for (node, engine), gaps in engines.items()}
            for name, why in outliers(named, max_drift=self.max_drift).items():
                node, _, engine = name.partition(" ")
                found[int(node), engine] = why
        by_node: dict[int, dict[str, str]] = defaultdict(dict)
        for (node_index, engine), why in found.items():
            log.warning("node %d: engine %s is to be quarantined: %s", node_index, engine, why)
            by_node[node_index][engine] = why
            for engines in self._gaps.values():
                engines.pop((node_index, engine), None)
        return dict(by_node)


def gaps_by_age(origins: Sequence[Origin], gaps: Sequence[float]) -> dict[str, float]:
    """Return the mean of sequences' gaps by their age, as `gap_age_0` and so on: metrics."""
    by_age: dict[int, list[float]] = defaultdict(list)
    for origin, gap in zip(origins, gaps, strict=True):
        by_age[origin.age].append(gap)
    return {f"gap_age_{age}": sum(found) / len(found) for age, found in sorted(by_age.items())}


class _Response(msgspec.Struct):
    engine: str = ""


class _Extra(msgspec.Struct):
    response: _Response | None = None


class _Message(msgspec.Struct):
    extra: _Extra | None = None


class _Record(msgspec.Struct):
    messages: list[_Message] = []


_record = msgspec.json.Decoder(_Record)


def origin_of(item: Trajectory, age: int) -> Origin:
    """Read from a trajectory's own record which engine answered it."""
    try:
        messages = _record.decode(item.messages).messages
    except msgspec.ValidationError:
        messages = []  # another agent's record: it names no engine
    engines = {
        message.extra.response.engine
        for message in messages
        if message.extra is not None and message.extra.response is not None
    }
    engine = engines.pop() if len(engines) == 1 else ""
    return Origin(node=item.node, engine=engine, age=age, draw=item.draw)
