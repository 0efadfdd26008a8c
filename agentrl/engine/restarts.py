"""What follows from an engine's faults: when it starts again, with graphs or without, or not."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agentrl.config import EngineConfig
from agentrl.engine.faults import HOST_KINDS, LASTING_KINDS

RESTART_WINDOW_S = 600.0
"""Over which `engine.max_restarts` counts."""
FAULT_WINDOW_S = 1800.0
"""Over which faults count against graphs and against the node."""
FIRST_BACKOFF_S = {"embedded": 0.25, "sglang": 1.0}
MAX_BACKOFF_S = 10.0
NOT_GRAPHS = frozenset(
    {"version", "start", "port", "import", "model", "out_of_memory", "drift", "collective"}
)
"""Causes that running without graphs would not mend."""
NOT_HARDWARE = NOT_GRAPHS - {"drift"}
"""Causes that say nothing of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How one life of an engine ended."""

    cause: str
    """A kind of faults.py, or `hang`, `exit`, `unresponsive`, `start`, `version`, `drift`."""
    detail: str
    unknown_lines: int = 0
    """Lines of its log that look like errors and are not known."""

    @property
    def is_lasting(self) -> bool:
        return self.cause in LASTING_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    delay_s: float = 0.0
    graphs: bool = True
    restarts: int = 0
    """Of this engine within the window, the coming one included."""
    gives_up: str = ""
    """Why there is no other start; empty: there is one."""
    suspect: str = ""
    """Why the whole node is to be stayed away from; empty: it is not."""


@dataclass(slots=True)
class FaultHistory:
    """Of the engines of one node."""

    config: EngineConfig
    _faults: deque[tuple[float, int, str]] = field(default_factory=deque)
    _restarts: dict[int, deque[float]] = field(default_factory=dict)
    _graphs_off_until: dict[int, float] = field(default_factory=dict)

    def note(self, engine: int, fault: Fault, at: float) -> Verdict:
        """Take a fault at `at` seconds and say what follows."""
        self._faults.append((at, engine, fault.cause))
        while at - self._faults[0][0] > FAULT_WINDOW_S:
            self._faults.popleft()
        restarts = self._restarts.setdefault(engine, deque())
        while restarts and at - restarts[0] > RESTART_WINDOW_S:
            restarts.popleft()
        suspect = self._suspect(fault)
        if fault.is_lasting:
            reason = "the next start would meet the same"
            return Verdict(gives_up=reason, suspect=suspect, restarts=len(restarts))
        if len(restarts) >= self.config.max_restarts:
            reason = (
                f"it failed again after {len(restarts)} restarts within {RESTART_WINDOW_S:.0f} s "
                f"(engine.max_restarts={self.config.max_restarts})"
            )
            return Verdict(gives_up=reason, suspect=suspect, restarts=len(restarts))
        restarts.append(at)
        self._judge_graphs(engine, at)
        backoff = FIRST_BACKOFF_S[self.config.kind] * 2 ** (len(restarts) - 1)
        return Verdict(
            delay_s=min(backoff, MAX_BACKOFF_S),
            graphs=self.has_graphs(engine, at),
            restarts=len(restarts),
            suspect=suspect,
        )

    def has_graphs(self, engine: int, at: float) -> bool:
        return at >= self._graphs_off_until.get(engine, 0.0)

    def graphs_return_in(self, engine: int, at: float) -> float | None:
        """Return the seconds until this engine may have graphs again, None if it has them."""
        until = self._graphs_off_until.get(engine, 0.0)
        return until - at if until > at else None

    def _judge_graphs(self, engine: int, at: float) -> None:
        """Without graphs decoding is several times slower, so it takes several faults, and ends."""
        if not self.config.is_on_gpus:
            return  # it has none, and would be started anew for their return
        mine = [cause for _, whose, cause in self._faults if whose == engine]
        counted = sum(cause not in NOT_GRAPHS for cause in mine)
        if counted >= self.config.graph_faults and self.has_graphs(engine, at):
            self._graphs_off_until[engine] = at + self.config.graphs_off_s

    def _suspect(self, fault: Fault) -> str:
        if fault.cause in HOST_KINDS:
            return f"{fault.cause}: {fault.detail}"
        counted = [(whose, cause) for _, whose, cause in self._faults if cause not in NOT_HARDWARE]
        engines = {whose for whose, _ in counted}
        if len(counted) < self.config.suspect_faults or len(engines) < 2:
            return ""
        return (
            f"{len(counted)} faults of {len(engines)} engines within {FAULT_WINDOW_S:.0f} s: "
            + ", ".join(cause for _, cause in counted)
        )
