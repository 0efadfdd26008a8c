"""What keepers tell of their engines: events, in one place."""

from __future__ import annotations

from agentrl.engine.progress import Load
from agentrl.engine.restarts import Fault, Verdict
from agentrl.engine.scrape import EngineNumbers
from agentrl.events import (
    EngineFault,
    EngineMetrics,
    EngineState,
    NodeSuspect,
    VersionEvent,
    Writer,
    now,
)


class Reports:
    def __init__(self, events: Writer) -> None:
        self._events = events

    def state(self, engine: str, state: str, version: int, *, load: Load | None = None) -> None:
        at, load = now(), load or Load()
        self._events.write(
            EngineState(
                start=at, end=at, engine=engine, state=state, version=version,
                running=load.running, waiting=load.waiting,
                generated_tokens=load.generated_tokens, busy_s=load.busy_s,
            )
        )  # fmt: skip

    def fault(self, engine: str, fault: Fault, verdict: Verdict, *, began: float) -> None:
        """began: when it was noticed; the event ends when its process and memory are gone."""
        self._events.write(
            EngineFault(
                start=began, end=now(), engine=engine, cause=fault.cause, detail=fault.detail,
                restarts=verdict.restarts, graphs=verdict.graphs,
                unknown_lines=fault.unknown_lines,
            )
        )  # fmt: skip

    def version(self, engine: str, version: int, phase: str) -> None:
        at = now()
        self._events.write(
            VersionEvent(start=at, end=at, version=version, phase=phase, engine=engine)
        )

    def metrics(self, engine: str, found: EngineNumbers) -> None:
        at = now()
        self._events.write(
            EngineMetrics(
                start=at, end=at, engine=engine, running=int(found.running),
                queued=int(found.queued), token_usage=found.token_usage,
                cache_hit_rate=found.cache_hit_rate, throughput=found.throughput,
                generated_tokens=int(found.generated_tokens), aborted=int(found.aborted),
                retracted=int(found.retracted), graph_passes=int(found.graph_passes),
                eager_passes=int(found.eager_passes),
            )
        )  # fmt: skip

    def suspect(self, reason: str) -> None:
        at = now()
        self._events.write(NodeSuspect(start=at, end=at, reason=reason))
