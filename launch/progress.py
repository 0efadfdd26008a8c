"""Where a run stands, from its events as they are written; and the bar that shows it."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl import events
from launch.command import say

WINDOW_S = 300.0
STEPS_SHOWN = 10
WANTED = ("step", "trajectory", "engine_fault", "drop", "engine_state")
_MARKS = tuple(f'"kind":"{kind}"'.encode() for kind in WANTED)
_decoder = msgspec.json.Decoder(events.AnyEvent)


class EventTail:
    """Reads what was appended to the files of a folder since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[events.AnyEvent]:
        """Return new whole lines of the kinds that are shown, the oldest first.

        A torn one waits for its rest.
        """
        found: list[events.AnyEvent] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
            except FileNotFoundError:
                continue  # it went after it was listed: nothing new is in it
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + whole
            new = [event for line in data[:whole].splitlines() if (event := _decode(line))]
            found += [_of_node(event, path) for event in new]
        return sorted(found, key=lambda event: event.end)


def _of_node(event: events.AnyEvent, path: Path) -> events.AnyEvent:
    """Name an engine by its node too."""
    if not isinstance(event, events.EngineState | events.EngineFault):
        return event
    _, node = events.writer_of(path.name)
    return msgspec.structs.replace(event, engine=events.engine_of(node, event.engine))


def _decode(line: bytes) -> events.AnyEvent | None:
    if not any(mark in line for mark in _MARKS):
        return None
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None  # another version's, or torn by a crash


@dataclass
class Standing:
    """What a person wants to see at a glance; `add` events as they ended."""

    step: int = 0
    version: int = -1
    reward: float | None = None
    trajectories: int = 0
    graded: int = 0
    reward_sum: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    last_fault: str = ""
    engines: dict[str, str] = field(default_factory=dict)
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=20000))
    _steps: deque[events.Step] = field(default_factory=lambda: deque(maxlen=STEPS_SHOWN))

    def add(self, found: list[events.AnyEvent]) -> None:
        for event in found:
            if isinstance(event, events.Step):
                self._add_step(event)
            elif isinstance(event, events.TrajectoryEvent):
                self.trajectories += 1
                self.causes[event.cause] += 1
                self._ends.append(event.end)
                if event.reward is not None:
                    self.graded += 1
                    self.reward_sum += event.reward
            elif isinstance(event, events.EngineFault):
                self.faults += 1
                self.last_fault = f"{event.engine}: {event.cause}"
            elif isinstance(event, events.Drop):
                self.drops[f"{event.what}: {event.reason}"] += event.count
            elif isinstance(event, events.EngineState) and event.state != "load":
                self.engines[event.engine] = event.state

    def _add_step(self, event: events.Step) -> None:
        self._steps.append(event)
        self.step = event.step
        self.version = event.version
        rewards = [step.metrics["reward"] for step in self._steps if "reward" in step.metrics]
        self.reward = sum(rewards) / len(rewards) if rewards else None

    def waiting_share(self) -> float | None:
        """Return the trainer's share of time spent waiting for groups, over the last steps."""
        total = sum(step.seconds for step in self._steps)
        return sum(step.wait_s for step in self._steps) / total if total > 0 else None

    def trajectories_per_hour(self, at: float | None = None) -> float:
        """Return the rate over the last five minutes up to `at` (now)."""
        at = time.time() if at is None else at
        recent = [end for end in self._ends if at - WINDOW_S <= end <= at]
        return len(recent) * 3600 / max(at - min(recent), 1.0) if recent else 0.0

    def line(self, at: float | None = None) -> str:
        """Return the short text beside the bar."""
        parts = [f"{self.trajectories_per_hour(at):.0f} traj/h"]
        if self.reward is not None:
            parts.insert(0, f"reward {self.reward:.3f}")
        if (share := self.waiting_share()) is not None:
            parts.append(f"trainer waits {share:.0%}")
        if self.last_fault:
            parts.append(f"{self.faults} faults, last {self.last_fault}")
        return " · ".join(parts)


class Bar:
    """A progress bar on a terminal; a line every `every_s` seconds where there is none."""

    def __init__(self, what: str, total: int, *, every_s: float = 15.0) -> None:
        self._what, self._total, self._every_s = what, total, every_s
        self._is_live = sys.stdout.isatty()
        self._said_at = 0.0
        self._done = self._newest = -1
        self._text = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(),
            refresh_per_second=4,
            disable=not self._is_live,
        )
        self._task = self._progress.add_task(what, total=total, text="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if not self._is_live and self._newest != self._done:
            self._say_line()

    def update(self, done: int, text: str = "", *, total: int | None = None) -> None:
        """Show that `done` of the total are done."""
        self._total = total or self._total
        self._progress.update(self._task, completed=done, total=self._total, text=text)
        due = time.monotonic() - self._said_at > self._every_s
        self._newest, self._text = done, text
        if not self._is_live and done != self._done and (due or done == self._total):
            self._say_line()

    def _say_line(self) -> None:
        self._said_at = time.monotonic()
        self._done = self._newest
        say(f"{self._what} {self._done}/{self._total} {self._text}".rstrip())

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._is_live:
            say(text)
            return
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
