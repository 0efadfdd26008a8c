"""Where a run stands, in the numbers of its report."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from agentrl import events
from analysis import faults, step_time, throughput, training_curves
from analysis.run_files import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Each as the report defines it; NaN where it is not known."""

    step: int = 0
    version: int = -1
    reward: float = nan
    """Mean of the last steps, as many as the curves' line is a mean of."""
    trainer_idle: float = nan
    trajectories: int = 0
    per_hour: float = nan
    concurrent: float = nan
    engines_idle: float = nan
    tokens_per_s: float = nan
    lost: int = 0
    """Trajectories without a reward."""
    faults: int = 0
    last_fault: str = ""
    engines: tuple[tuple[str, str], ...] = ()
    """Name and last state of each engine, by name."""


def standing(run: Run) -> Standing:
    """Count what the run's events tell by now."""
    steps, work = step_time.table(run), throughput.table(run)
    done = run.of(events.TrajectoryEvent)
    broken = run.of(events.EngineFault)
    states = [state for state in run.of(events.EngineState) if state.state != "load"]
    return Standing(
        step=steps[-1].step if steps else 0,
        version=run.of(events.Step)[-1].version if steps else -1,
        reward=training_curves.newest(training_curves.table(run), "reward"),
        trainer_idle=step_time.idle_share(steps) if steps else nan,
        trajectories=len(done),
        per_hour=throughput.per_hour(work) if work else nan,
        concurrent=throughput.concurrent(work) if work else nan,
        engines_idle=throughput.idle_share(work),
        tokens_per_s=throughput.tokens_per_s(work),
        lost=sum(each.reward is None for each in done),
        faults=sum(row.count for row in faults.table(run) if row.kind == "engine fault"),
        last_fault=f"{broken[-1].engine}: {broken[-1].cause}" if broken else "",
        engines=tuple(sorted({state.engine: state.state for state in states}.items())),
    )
