"""Trajectories that agents wrote: mini-swe-agent's `*.traj.json`, and Harbor's trial folders.

mini-swe-agent 1.1 and its kin give each message a time: a model call lasts from the message before
it to the reply, a command from the reply to its observation. Harbor's result.json gives the times
of its four phases, and agent/trajectory.json (ATIF 1.x) the steps inside one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl import events
from analysis.sources.adapted import Adapted, seconds

Json = Mapping[str, Any]
UNGRADED = "ungraded"
"""Cause of a trajectory whose record holds no verdict: it is not lost, but has no reward."""
CAUSES = {
    "Submitted": "submitted",
    "LimitsExceeded": "turn_limit",
    "RepeatedFormatError": "malformed",
    "TimeExceeded": "time_limit",
}
PHASES = {"environment_setup": events.SandboxStart, "agent_setup": events.Setup}


class MiniSweAgent:
    """One trajectory a file."""

    name = "mini-swe-agent trajectory"

    def fits(self, path: Path, head: str) -> bool:
        return path.name.endswith(".traj.json") or '"trajectory_format": "mini-swe-agent' in head

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add calls, commands and the trajectory; a SWE-bench report gives the verdict, if any."""
        for number, path in enumerate(sorted(paths)):
            into.lines += 1
            found = _document(path, into)
            if found is None:
                continue
            parts = (found.get("messages"), found.get("info"))
            if not (isinstance(parts[0], list) and isinstance(parts[1], dict)):
                into.refuse("JSON without info and messages", path.name)
                continue
            into.known += 1
            into.events += _messages(path, number, found)


class Harbor:
    """One trial a folder."""

    name = "Harbor trial"

    def fits(self, path: Path, head: str) -> bool:
        return path.name == "result.json" and '"trial_name"' in head

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add each trial's phases, steps and verdict."""
        tasks: dict[str, int] = {}
        attempts: dict[str, int] = {}
        for path in sorted(paths):
            into.lines += 1
            found = _document(path, into)
            if found is None:
                continue
            if not (found.get("started_at") and found.get("finished_at")):
                into.refuse("trial without its times", path.parent.name)
                continue
            task = str(found.get("task_name", ""))
            draw = tasks.setdefault(task, len(tasks))
            attempts[task] = attempts.get(task, -1) + 1
            into.known += 1
            into.events += _trial(path, found, (draw, attempts[task]), into)


def _document(path: Path, into: Adapted) -> Json | None:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        into.refuse("not JSON", f"{path.name}: {error}")
        return None
    if not isinstance(found, dict):
        into.refuse("JSON that is no object", path.name)
        return None
    return found


def _messages(path: Path, number: int, found: Json) -> Iterator[events.Event]:
    name = path.name.removesuffix(".traj.json").removesuffix(".json")
    first = last = turn = 0.0
    for message in found["messages"]:
        extra = message.get("extra") or {}
        at = float(extra.get("timestamp") or 0.0)
        role = message.get("role")
        if role == "assistant" and at:
            usage = (extra.get("response") or {}).get("usage") or {}
            yield events.ModelCall(
                trajectory=name,
                engine=str((extra.get("response") or {}).get("model", "")),
                turn=int(turn),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                new_tokens=int(usage.get("completion_tokens") or 0),
                start=last or at,
                end=at,
            )
            turn += 1
        elif at and last and "returncode" in extra:
            code = extra["returncode"]
            yield events.ToolCall(
                trajectory=name, turn=max(0, int(turn) - 1), exit_code=int(code),
                timed_out=code == -1, start=last, end=at,
            )  # fmt: skip
        first, last = first or at, at or last
    status = str(found["info"].get("exit_status", ""))
    yield events.TrajectoryEvent(
        trajectory=name,
        draw=number,
        task=str(found.get("instance_id") or name),
        attempt=0,
        cause=UNGRADED if CAUSES.get(status, "submitted") == "submitted" else CAUSES[status],
        detail=f"exit_status {status}",
        turns=int(turn),
        start=first,
        end=last,
    )


def _trial(
    path: Path, found: Json, place: tuple[int, int], into: Adapted
) -> Iterator[events.Event]:
    name = str(found["trial_name"])
    for key, kind in PHASES.items():
        if phase := _phase(found, key):
            backend = str((found.get("config") or {}).get("environment", {}).get("type", "harbor"))
            more = {"backend": backend} if kind is events.SandboxStart else {}
            yield kind(trajectory=name, start=phase[0], end=phase[1], **more)
    if phase := _phase(found, "verifier"):
        solved = (_reward(found) or 0.0) > 0
        yield events.Grade(trajectory=name, resolved=solved, start=phase[0], end=phase[1])
    turns = 0
    for step in _atif(path.parent, name, _phase(found, "agent_execution"), into):
        turns += isinstance(step, events.ModelCall)
        yield step
    usage = found.get("agent_result") or {}
    failed = (found.get("exception_info") or {}).get("exception_type", "")
    reward = _reward(found)
    yield events.TrajectoryEvent(
        trajectory=name,
        draw=place[0],
        task=str(found.get("task_name", "")),
        attempt=place[1],
        cause=_cause(str(failed), reward),
        reward=reward,
        turns=turns,
        tokens=int(usage.get("n_input_tokens") or 0),
        sampled_tokens=int(usage.get("n_output_tokens") or 0),
        detail=str(failed),
        start=seconds(found["started_at"]),
        end=seconds(found["finished_at"]),
    )


def _cause(failed: str, reward: float | None) -> str:
    if reward is None:
        return "grading" if "Verifier" in failed or "Reward" in failed else "infra"
    return "time_limit" if "Timeout" in failed else "submitted"


def _reward(found: Json) -> float | None:
    verdict = found.get("verifier_result") or {}
    rewards = verdict.get("rewards") or {}
    value = rewards.get("reward", verdict.get("reward"))
    return float(value) if isinstance(value, (int, float)) else None


def _phase(found: Json, name: str) -> tuple[float, float] | None:
    phase = found.get(name) or {}
    if not (phase.get("started_at") and phase.get("finished_at")):
        return None
    return seconds(phase["started_at"]), seconds(phase["finished_at"])


def _atif(
    folder: Path, name: str, phase: tuple[float, float] | None, into: Adapted
) -> Iterator[events.Event]:
    """Yield the model calls and commands of agent/trajectory.json, by the times of its steps.

    A step's time is when it was recorded: a reply's call is from the step before it to it. The
    observation stands in the same step, so commands have no times of their own and are left out.
    """
    path = folder / "agent" / "trajectory.json"
    found = _document(path, into) if path.is_file() else None
    if found is None:
        return
    version = str(found.get("schema_version", ""))
    if not version.startswith("ATIF-v1"):
        into.refuse(f"trajectory of schema {version or 'unknown'}", path.parent.parent.name)
        return
    last = phase[0] if phase else 0.0
    turn = 0
    for step in found.get("steps") or ():
        if not step.get("timestamp"):
            into.passed["steps without a time"] += 1
            continue
        at = seconds(step["timestamp"])
        if step.get("source") == "agent" and last:
            usage = step.get("metrics") or {}
            yield events.ModelCall(
                trajectory=name,
                engine=str(step.get("model_name") or found.get("agent", {}).get("model_name", "")),
                turn=turn,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                new_tokens=int(usage.get("completion_tokens") or 0),
                cached_tokens=int(usage.get("cached_tokens") or 0),
                start=last,
                end=at,
            )
            turn += 1
        last = at
