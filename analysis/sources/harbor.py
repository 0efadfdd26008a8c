"""Harbor's trial folders: the four phases of result.json, the steps of an ATIF 1.x trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from agentrl import events
from analysis.sources.adapted import Adapted, since_epoch
from analysis.sources.mini_swe_agent import Usage, call


class _Phase(msgspec.Struct, frozen=True):
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def span(self) -> tuple[float, float] | None:
        if self.started_at is None or self.finished_at is None:
            return None
        return since_epoch(self.started_at), since_epoch(self.finished_at)


class _Environment(msgspec.Struct, frozen=True):
    type: str | None = None


class _Config(msgspec.Struct, frozen=True):
    environment: _Environment | None = None


class _Exception(msgspec.Struct, frozen=True):
    exception_type: str = ""


class _Tokens(msgspec.Struct, frozen=True):
    n_input_tokens: int | None = None
    n_output_tokens: int | None = None


class _Verdict(msgspec.Struct, frozen=True):
    rewards: dict[str, float | None] | None = None
    reward: float | None = None


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a trial's result.json that are used."""

    trial_name: str
    started_at: datetime
    finished_at: datetime
    task_name: str = ""
    config: _Config | None = None
    environment_setup: _Phase | None = None
    agent_setup: _Phase | None = None
    agent_execution: _Phase | None = None
    verifier: _Phase | None = None
    agent_result: _Tokens | None = None
    verifier_result: _Verdict | None = None
    exception_info: _Exception | None = None

    def phase(self, name: str) -> tuple[float, float] | None:
        found: _Phase | None = getattr(self, name)
        return found.span if found else None

    @property
    def reward(self) -> float | None:
        verdict = self.verifier_result
        if verdict is None:
            return None
        return (verdict.rewards or {}).get("reward", verdict.reward)

    @property
    def failed(self) -> str:
        return self.exception_info.exception_type if self.exception_info else ""


class _Step(msgspec.Struct, frozen=True):
    timestamp: datetime | None = None
    source: str = ""
    model_name: str | None = None
    metrics: Usage | None = None


class _Agent(msgspec.Struct, frozen=True):
    model_name: str | None = None


class _Atif(msgspec.Struct, frozen=True):
    """The keys of an agent/trajectory.json that are used."""

    schema_version: str
    steps: list[_Step] = []
    agent: _Agent = _Agent()


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
            found = into.decoded(path.read_bytes(), _Trial, path.parent.name)
            if found is None:
                continue
            draw = tasks.setdefault(found.task_name, len(tasks))
            attempts[found.task_name] = attempts.get(found.task_name, -1) + 1
            into.known += 1
            into.events += _phases(found)
            steps = list(_steps(path.parent, found, into))
            into.events += steps
            place = (draw, attempts[found.task_name])
            into.events.append(_ended(found, place, turns=len(steps)))


def _phases(found: _Trial) -> Iterator[events.Event]:
    name = found.trial_name
    environment = found.config.environment if found.config else None
    if span := found.phase("environment_setup"):
        backend = (environment.type if environment else None) or "harbor"
        yield events.SandboxStart(trajectory=name, backend=backend, start=span[0], end=span[1])
    if span := found.phase("agent_setup"):
        yield events.Setup(trajectory=name, start=span[0], end=span[1])
    if span := found.phase("verifier"):
        is_solved = (found.reward or 0.0) > 0
        yield events.Grade(trajectory=name, resolved=is_solved, start=span[0], end=span[1])


def _ended(found: _Trial, place: tuple[int, int], *, turns: int) -> events.TrajectoryEvent:
    usage = found.agent_result or _Tokens()
    return events.TrajectoryEvent(
        trajectory=found.trial_name,
        draw=place[0],
        task=found.task_name,
        attempt=place[1],
        cause=_cause(found.failed, found.reward),
        reward=found.reward,
        turns=turns,
        tokens=usage.n_input_tokens or 0,
        sampled_tokens=usage.n_output_tokens or 0,
        detail=found.failed,
        start=since_epoch(found.started_at),
        end=since_epoch(found.finished_at),
    )


def _cause(failed: str, reward: float | None) -> str:
    if reward is None:
        return "grading" if "Verifier" in failed or "Reward" in failed else "infra"
    return "time_limit" if "Timeout" in failed else "submitted"


def _steps(folder: Path, trial: _Trial, into: Adapted) -> Iterator[events.ModelCall]:
    """Yield the model calls of agent/trajectory.json, by the times of its steps.

    A step's time is when it was recorded: a reply's call is from the step before it to it. The
    observation stands in the same step, so commands have no times of their own and are left out.
    """
    path = folder / "agent" / "trajectory.json"
    found = into.decoded(path.read_bytes(), _Atif, folder.name) if path.is_file() else None
    if found is None:
        return
    if not found.schema_version.startswith("ATIF-v1"):
        into.refuse(f"trajectory of schema {found.schema_version[:40]}", folder.name)
        return
    phase = trial.phase("agent_execution")
    last = phase[0] if phase else 0.0
    turn = 0
    for step in found.steps:
        if step.timestamp is None:
            into.passed["steps without a time"] += 1
            continue
        at = since_epoch(step.timestamp)
        if step.source == "agent" and last:
            engine = step.model_name or found.agent.model_name or ""
            yield call(trial.trial_name, (last, at), turn, engine, step.metrics)
            turn += 1
        last = at
