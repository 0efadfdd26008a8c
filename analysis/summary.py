"""What a run came to, in plain words and a few large numbers. Every number is from its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl import events
from analysis import (
    faults,
    gpu_hours,
    long_tail,
    solve_rate,
    step_time,
    throughput,
    training_curves,
    trajectory_time,
    what_now,
)
from analysis.run_files import Run
from analysis.stages import spoken, stages
from analysis.steps import of_run
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
    line = of_run(run)
    done = len(run.store.table(events.TrajectoryEvent))
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
        split = solve_rate.main_split(rows)
        row = solve_rate.pick(rows, "pass", model, split, 1.0)
        if row:
            where = split.replace("_", " ")
            note = f"95 %: {100 * row.low:.1f} to {100 * row.high:.1f}, {where}, T=1"
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


Json = dict[str, object]


def numbers(run: Run) -> Json:
    """Return the report's numbers for scripts; each is null or left out where it is not known."""
    return {
        "run": run.name,
        "problems": list(run.problems),
        "events": len(run.store),
        "rejected": run.rejected,
        "solve_rate": [
            {
                "kind": row.kind,
                "model": row.model,
                "split": row.split,
                "temperature": row.temperature,
                "k": row.k,
                "value": row.value,
                "low": row.low,
                "high": row.high,
                "tasks": row.tasks,
            }
            for row in solve_rate.table(run)
        ],
        "reward": training_curves.newest(training_curves.table(run), "reward"),
        "step_time": _step_numbers(run),
        "long_tail": _tail_numbers(run),
        "trajectory_time": _trajectory_numbers(run),
        "throughput": _throughput_numbers(run),
        "losses": {f"{r.kind}: {r.cause}": r.count for r in faults.by_cause(faults.table(run))},
        "gpu_hours": {row.cause: row.gpu_hours for row in gpu_hours.table(run)},
        "what_now": [
            {"what": row.what, "share": row.share, "setting": row.setting, "change": row.change}
            for row in what_now.table(run)
        ],
    }


def _step_numbers(run: Run) -> Json:
    rows = step_time.table(run)
    if not rows:
        return {}
    return {
        "seconds": step_time.step_seconds(rows),
        "parts": step_time.means(rows),
        "trainer_idle": step_time.idle_share(rows),
        "steps": len(rows),
        "steady_steps": sum(row.steady for row in rows),
    }


def _tail_numbers(run: Run) -> Json:
    rows = long_tail.table(run)
    if not rows:
        return {}
    return {
        "tail_share": long_tail.tail_share(rows),
        "limits": long_tail.limit_shares(rows),
        "solved_turns_median": long_tail.solved_turns(rows),
        "longest_s": max(row.end - row.start for row in rows),
        "trajectories": len(rows),
    }


def _trajectory_numbers(run: Run) -> Json:
    rows = trajectory_time.table(run)
    if not rows:
        return {}
    return {
        "seconds": trajectory_time.means(rows),
        "shares": trajectory_time.shares(rows),
        "trajectories": len(trajectory_time.counted(rows)),
    }


def _throughput_numbers(run: Run) -> Json:
    rows = throughput.table(run)
    if not rows:
        return {}
    return {
        "trajectories_per_hour": throughput.per_hour(rows),
        "concurrent": throughput.concurrent(rows),
        "model_call_s": throughput.latency(rows),
        "tokens_per_s": throughput.tokens_per_s(rows),
        "engines_idle": throughput.idle_share(rows),
    }
