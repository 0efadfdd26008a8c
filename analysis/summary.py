"""What a run came to, in plain words and a few large numbers. Every number is from its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl import events
from analysis import faults, solve_rate, step_time, throughput
from analysis.evaluations import SPLITS
from analysis.run_files import Run
from analysis.stages import spoken, stages
from analysis.steps import lineage
from analysis.table import whole_percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One large number."""

    title: str
    value: str
    note: str


def cards(run: Run) -> list[Card]:
    return [*_rate_cards(run), *_time_cards(run)]


def sentences(run: Run) -> list[str]:
    """Return the summary, a sentence or two a line."""
    return [text for text in (_trained(run), *_rates(run), _times(run), _losses(run)) if text]


def _trained(run: Run) -> str:
    line = lineage(run.events)
    done = len(run.of(events.TrajectoryEvent))
    if not line.steps:
        tuned = " It was fine-tuned only." if run.sft else ""
        return f"Run {run.name}: no optimizer step of reinforcement learning is on record.{tuned}"
    what = (
        f" the model {run.config.model.path} on {run.config.tasks.source} tasks"
        if run.config
        else ""
    )
    after = f", after {run.sft.steps:,} steps of supervised fine-tuning" if run.sft else ""
    return (
        f"Run {run.name} trained{what}: {len(line.steps)} steps of reinforcement learning from "
        f"{done:,} trajectories{after}."
    )


def _rates(run: Run) -> Iterator[str]:
    rows = solve_rate.table(run)
    if not rows:
        yield solve_rate.FIGURE.missing
        return
    yield solve_rate.verdict(rows)
    yield solve_rate.control(rows)


def _times(run: Run) -> str:
    found = stages(run)
    if not found:
        return "No file says how long the stages took."
    parts = [f"{each.name} {spoken(each.seconds)}" for each in found if each.kind != "evaluation"]
    evaluations = [each.seconds for each in found if each.kind == "evaluation"]
    if evaluations:
        parts.append(f"{len(evaluations)} evaluations {spoken(sum(evaluations))} in all")
    return f"Time: {', '.join(parts)}."


def _losses(run: Run) -> str:
    return f"Losses: {faults.finding(faults.table(run))}"


def _rate_cards(run: Run) -> Iterator[Card]:
    rows = solve_rate.table(run)
    for model, title in (("sft", "pass@1 after SFT"), ("rl", "pass@1 after RL")):
        row = solve_rate.pick(rows, "pass", model, SPLITS[0], 1.0)
        if row:
            note = f"95 %: {100 * row.low:.1f} to {100 * row.high:.1f}, held out, T=1"
            yield Card(title=title, value=f"{100 * row.value:.1f} %", note=note)


def _time_cards(run: Run) -> Iterator[Card]:
    rows = throughput.table(run)
    if rows:
        many = sum(row.trajectories for row in rows)
        yield Card(
            title="Trajectories an hour",
            value=f"{throughput.per_hour(rows):,.0f}",
            note=f"{many:,} in all",
        )
    steps = step_time.table(run)
    if steps:
        share = step_time.idle_share(steps)
        yield Card(
            title="Trainer idle",
            value=whole_percent(share),
            note="waiting for groups, steady state",
        )
    idle = throughput.idle_share(rows)
    if idle == idle:
        yield Card(title="Engines idle", value=whole_percent(idle), note="of their sampled time")
    done = run.of(events.TrajectoryEvent)
    if done:
        lost = sum(event.reward is None for event in done)
        note = f"of {len(done):,}; never trained on"
        yield Card(title="Lost trajectories", value=f"{lost:,}", note=note)
