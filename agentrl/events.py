"""What happened, one JSON object a line, each process to its own file.

Readers bear a torn last line and unknown fields, and count what they reject.
Times are seconds since the epoch. Spans have `start` and `end`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar, TypeVar

import msgspec


class Event(msgspec.Struct, kw_only=True, tag_field="kind", frozen=True, omit_defaults=True):
    """Base of all kinds; the class name in snake case is the JSON `kind`."""

    start: float = 0.0
    end: float = 0.0

    kind: ClassVar[str]

    @property
    def seconds(self) -> float:
        return self.end - self.start


class LaunchAttempt(Event, tag="launch_attempt", frozen=True):
    attempt: int
    phase: str
    """`begin` or `end`."""
    reason: str = ""
    step: int = 0


class EngineState(Event, tag="engine_state", frozen=True):
    engine: str
    state: str
    """`starting`, `ready`, `paused`, `stopped`, `failed`; or `load`, a periodic sample."""
    version: int = -1
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """Since the engine started."""
    busy_s: float = 0.0
    """Seconds since its start that the engine spent computing."""


class EngineFault(Event, tag="engine_fault", frozen=True):
    engine: str
    cause: str
    detail: str = ""
    restarts: int = 0
    graphs: bool = True
    """Whether it starts again with graphs."""
    unknown_lines: int = 0
    """Lines of its log that look like errors and are of no known kind."""


class EngineMetrics(Event, tag="engine_metrics", frozen=True):
    engine: str
    running: int = 0
    queued: int = 0
    token_usage: float = 0.0
    """Share of the KV cache in use."""
    cache_hit_rate: float = 0.0
    """Share of prompt tokens that were not computed, since the engine's start."""
    throughput: float = 0.0
    """Generated tokens a second, the engine's own figure."""
    generated_tokens: int = 0
    aborted: int = 0
    retracted: int = 0
    graph_passes: int = 0
    """Forward passes that replayed a graph, since the engine's start."""
    eager_passes: int = 0


class NodeSuspect(Event, tag="node_suspect", frozen=True):
    reason: str


class VersionEvent(Event, tag="version", frozen=True):
    version: int
    phase: str
    """`published`, `pushed` or `push_failed` (trainer), `proved` (one engine) or `refused`."""
    engine: str = ""
    size: int = 0
    """Bytes."""


class SandboxStart(Event, tag="sandbox_start", frozen=True):
    trajectory: str
    backend: str
    queued_s: float = 0.0
    ok: bool = True
    detail: str = ""


class Setup(Event, tag="setup", frozen=True):
    trajectory: str


class ModelCall(Event, tag="model_call", frozen=True):
    trajectory: str
    engine: str
    turn: int
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int = 0
    finish: str = ""


class ToolCall(Event, tag="tool_call", frozen=True):
    trajectory: str
    turn: int
    exit_code: int
    timed_out: bool = False
    truncated: bool = False


class Grade(Event, tag="grade", frozen=True):
    trajectory: str
    resolved: bool
    passed: int = 0
    failed: int = 0


class TrajectoryEvent(Event, tag="trajectory", frozen=True):
    trajectory: str
    draw: int
    task: str
    attempt: int
    cause: str
    reward: float | None = None
    turns: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    tries: int = 1
    detail: str = ""
    """Of an infrastructure failure: the error's text, and its traceback when nobody expected it."""


class GroupEvent(Event, tag="group", frozen=True):
    draw: int
    task: str
    rewards: list[float | None] = []
    versions: list[int] = []
    """Oldest and newest version that sampled its tokens."""


class Step(Event, tag="step", frozen=True):
    step: int
    version: int
    wait_s: float
    logprob_s: float
    update_s: float
    publish_s: float
    checkpoint_s: float = 0.0
    """Of the checkpoint after the step before: this step's is written once this event is."""
    metrics: dict[str, float] = {}
    """Named by training/loop.py: reward, loss, grad_norm, entropy, ess, gap, staleness, …"""


class CheckpointEvent(Event, tag="checkpoint", frozen=True):
    step: int
    phase: str
    """`saved`, `loaded` or `refused`."""
    path: str = ""
    detail: str = ""


class Signal(Event, tag="signal", frozen=True):
    name: str
    action: str


class Network(Event, tag="network", frozen=True):
    node: str
    interface: str
    address: str
    subnet: str = ""
    why: str = ""
    """What put it before the other networks."""
    proof: str = ""
    problem: str = ""
    """Where a log of NCCL departs from this plan; empty when a role begins on it."""


class Drop(Event, tag="drop", frozen=True):
    what: str
    """`trajectory`, `group`, `spool_file`, `event_line`, `connection`."""
    reason: str
    draw: int = -1
    count: int = 1


AnyEvent = (
    LaunchAttempt
    | EngineState
    | EngineFault
    | EngineMetrics
    | NodeSuspect
    | VersionEvent
    | SandboxStart
    | Setup
    | ModelCall
    | ToolCall
    | Grade
    | TrajectoryEvent
    | GroupEvent
    | Step
    | CheckpointEvent
    | Signal
    | Network
    | Drop
)
GONE = "file that went between listing and reading"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
E_ = TypeVar("E_", bound=Event)


class EventWriter:
    """Appends events to one file; every line is handed to the kernel before `write` returns."""

    def __init__(self, folder: Path, role: str, *, node: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        node = node or socket.gethostname().split(".")[0]
        self.path = folder / f"{role}-{node}-{os.getpid()}.jsonl"
        self._file: IO[bytes] = self.path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        self._file.write(_encoder.encode(event) + b"\n")

    def sync(self) -> None:
        """Have all that was written outlive this node, as a kill of the process it does anyway.

        Called ahead of what makes it count: a checkpoint, a group.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def writer_of(name: str) -> tuple[str, str]:
    """Return role and node of the writer of an event file, from its name; no node if it has none.

    A node's name may hold dashes, a role's does not.
    """
    role, *rest = name.removesuffix(".jsonl").split("-")
    is_whole = len(rest) > 1 and rest[-1].isdigit()
    return (role, "-".join(rest[:-1])) if is_whole else (name.removesuffix(".jsonl"), "")


def engine_of(node: str, engine: str) -> str:
    """Name an engine by its node too, as 2/engine-0: each node numbers its own from 0."""
    return f"{node}/{engine}" if node and engine else engine


class NoEvents:
    """Stands where a writer is wanted and nobody reads."""

    def write(self, event: Event) -> None:
        del event

    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None


Writer = EventWriter | NoEvents


def read(path: Path, rejected: Counter[str] | None = None) -> Iterator[AnyEvent]:
    """Yield the events of one file; lines that are none are counted in `rejected` by reason."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                reason = "torn last line"
            else:
                try:
                    yield _decoder.decode(line)
                    continue
                except msgspec.DecodeError as error:
                    unknown = "Invalid value" in str(error) and "kind" in str(error)
                    reason = "unknown kind" if unknown else "not an event"
            if rejected is not None:
                rejected[reason] += 1


def read_folder(folder: Path, rejected: Counter[str] | None = None) -> list[AnyEvent]:
    """Return the events of every file in `folder`, ordered by their end.

    A file that goes between listing and reading is counted in `rejected`.
    """
    paths = sorted(folder.glob("*.jsonl"))
    found = [event for path in paths for event in _read_listed(path, rejected)]
    return sorted(found, key=lambda event: event.end or event.start)


def _read_listed(path: Path, rejected: Counter[str] | None) -> Iterator[AnyEvent]:
    try:
        yield from read(path, rejected)
    except FileNotFoundError:
        if rejected is not None:
            rejected[GONE] += 1


def now() -> float:
    return time.time()
