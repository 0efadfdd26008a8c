"""mini-swe-agent's trajectories, `*.traj.json`.

Version 1.1 and its kin give each message a time: a model call lasts from the message before it to
the reply, a command from the reply to its observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from agentrl import events
from analysis.sources.adapted import Adapted

UNGRADED = "ungraded"
"""Cause of a trajectory whose record holds no verdict: it is not lost, but has no reward."""
CAUSES = {
    "Submitted": "submitted",
    "LimitsExceeded": "turn_limit",
    "RepeatedFormatError": "malformed",
    "TimeExceeded": "time_limit",
}


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Response(msgspec.Struct, frozen=True):
    model: str | None = None
    usage: Usage | None = None


class _Extra(msgspec.Struct, frozen=True):
    timestamp: float | None = None
    """Seconds since the epoch."""
    response: _Response | None = None
    returncode: int | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str = ""
    extra: _Extra | None = None


class _Info(msgspec.Struct, frozen=True):
    exit_status: str | None = None


class _Trajectory(msgspec.Struct, frozen=True):
    """The keys of a *.traj.json that are used."""

    messages: list[_Message]
    info: _Info
    instance_id: str | None = None


class MiniSweAgent:
    """One trajectory a file."""

    name = "mini-swe-agent trajectory"

    def fits(self, path: Path, head: str) -> bool:
        return path.name.endswith(".traj.json") or '"trajectory_format": "mini-swe-agent' in head

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add calls, commands and the trajectory; a SWE-bench report gives the verdict, if any."""
        for number, path in enumerate(sorted(paths)):
            into.lines += 1
            if found := into.decoded(path.read_bytes(), _Trajectory, path.name):
                into.known += 1
                into.events += _messages(path, number, found)


def call(
    trajectory: str, span: tuple[float, float], turn: int, engine: str, usage: Usage | None
) -> events.ModelCall:
    """Return the event of one model call; counts that are not told are 0."""
    usage = usage or Usage()
    return events.ModelCall(
        trajectory=trajectory,
        engine=engine,
        turn=turn,
        prompt_tokens=usage.prompt_tokens or 0,
        new_tokens=usage.completion_tokens or 0,
        cached_tokens=usage.cached_tokens or 0,
        start=span[0],
        end=span[1],
    )


def _messages(path: Path, number: int, found: _Trajectory) -> Iterator[events.Event]:
    name = path.name.removesuffix(".traj.json").removesuffix(".json")
    first = last = 0.0
    turn = 0
    for message in found.messages:
        extra = message.extra or _Extra()
        at = extra.timestamp or 0.0
        if message.role == "assistant" and at:
            response = extra.response or _Response()
            yield call(name, (last or at, at), turn, response.model or "", response.usage)
            turn += 1
        elif at and last and extra.returncode is not None:
            yield events.ToolCall(
                trajectory=name, turn=max(0, turn - 1), exit_code=extra.returncode,
                timed_out=extra.returncode == -1, start=last, end=at,
            )  # fmt: skip
        first, last = first or at, at or last
    cause = CAUSES.get(found.info.exit_status or "", "submitted")
    yield events.TrajectoryEvent(
        trajectory=name,
        draw=number,
        task=found.instance_id or name,
        attempt=0,
        cause=UNGRADED if cause == "submitted" else cause,
        detail=f"exit_status {found.info.exit_status or ''}",
        turns=turn,
        start=first,
        end=last,
    )
