"""Figure: how much work the run did at a time.

Time is cut into equal bins. Trajectories an hour: those that ended in the bin ÷ its length.
Concurrent: mean number of trajectories under way. Engine busy share and tokens a second: growth
of `busy_s` and `generated_tokens` between load samples of one engine, over the time between
them, spread over the bins that they cover; busy is the mean over engines. A counter that
falls is an engine that began anew. The idle share is 1 − Σ busy ÷ Σ time sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.run_files import Run
from analysis.table import whole_percent

BINS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One bin of time."""

    minutes: float
    """Middle of the bin since the first trajectory's start."""
    seconds: float
    """Length of the bin."""
    trajectories: int
    """Ended in the bin."""
    concurrent: float
    busy_s: float
    """Engine-seconds of computing; NaN without load samples."""
    sampled_s: float
    """Engine-seconds that load samples cover."""
    tokens: float
    """Sampled by the engines; NaN without load samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What one engine did between two load samples."""

    start: float
    end: float
    busy_s: float
    tokens: float


def table(run: Run) -> list[Row]:
    done = run.of(events.TrajectoryEvent)
    if not done:
        return []
    first = min(event.start for event in done)
    width = max(1.0, max(event.end for event in done) - first) / BINS
    under_way = _spread(((event.start, event.end, event.seconds) for event in done), first, width)
    loads = list(intervals(run.of(events.EngineState)))
    covered = _spread(((x.start, x.end, x.end - x.start) for x in loads), first, width)
    busy = _spread(((x.start, x.end, x.busy_s) for x in loads), first, width)
    tokens = _spread(((x.start, x.end, x.tokens) for x in loads), first, width)
    ended = [0] * BINS
    for event in done:
        ended[min(BINS - 1, int((event.end - first) / width))] += 1
    return [
        Row(
            minutes=(i + 0.5) * width / 60,
            seconds=width,
            trajectories=ended[i],
            concurrent=under_way[i] / width,
            busy_s=busy[i] if covered[i] else nan,
            sampled_s=covered[i],
            tokens=tokens[i] if covered[i] else nan,
        )
        for i in range(BINS)
    ]


def intervals(states: Sequence[events.EngineState]) -> Iterator[Interval]:
    """Yield what each engine did between one load sample and its next."""
    samples: dict[str, list[events.EngineState]] = defaultdict(list)
    for state in states:
        if state.state == "load":
            samples[state.engine].append(state)
    for of_engine in samples.values():
        for old, new in pairwise(of_engine):
            start, end = _at(old), _at(new)
            began_anew = new.busy_s < old.busy_s or new.generated_tokens < old.generated_tokens
            if end > start and not began_anew:
                yield Interval(
                    start=start,
                    end=end,
                    busy_s=min(new.busy_s - old.busy_s, end - start),
                    tokens=new.generated_tokens - old.generated_tokens,
                )


def per_hour(rows: Sequence[Row]) -> float:
    """Return trajectories an hour over the whole time."""
    return 3600 * sum(row.trajectories for row in rows) / sum(row.seconds for row in rows)


def idle_share(rows: Sequence[Row]) -> float:
    """Return the share of their time that engines computed nothing; NaN if unknown."""
    known = [row for row in rows if row.sampled_s]
    sampled = sum(row.sampled_s for row in known)
    return 1 - sum(row.busy_s for row in known) / sampled if sampled else nan


def tokens_per_s(rows: Sequence[Row]) -> float:
    """Return sampled tokens a second over the bins with load samples; NaN if there are none."""
    known = [row for row in rows if row.sampled_s]
    seconds = sum(row.seconds for row in known)
    return sum(row.tokens for row in known) / seconds if seconds else nan


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, all_axes = plot.grid(4, narrow=narrow)
    panels = (
        ("Trajectories an hour", "ended, 1/h", [3600 * r.trajectories / r.seconds for r in rows]),
        ("Concurrent trajectories", "under way, mean", [r.concurrent for r in rows]),
        ("Engines busy", "% of their time", [_busy_percent(r) for r in rows]),
        ("Engine throughput", "sampled tokens/s", [r.tokens / r.seconds for r in rows]),
    )
    for axes, (title, unit, values) in zip(all_axes, panels, strict=True):
        axes.set_title(title)
        axes.set_ylabel(unit)
        _area(axes, rows, values)
    all_axes[2].set_ylim(0, 100)
    for axes in all_axes[-1:] if narrow else all_axes[-2:]:
        axes.set_xlabel("minutes since the first trajectory")
    plot.save(figure, path, png=not narrow)


def finding(rows: Sequence[Row]) -> str:
    many = sum(row.trajectories for row in rows)
    idle = idle_share(rows)
    engines = (
        f"Engines were idle {whole_percent(idle)} of the time and sampled "
        f"{tokens_per_s(rows):,.0f} tokens a second."
        if idle == idle
        else "Engines wrote no load samples, so their idle share is unknown."
    )
    return (
        f"{many:,} trajectories ended, {per_hour(rows):,.0f} an hour, with "
        f"{sum(row.concurrent for row in rows) / len(rows):.0f} under way on average. {engines}"
    )


def _at(event: events.Event) -> float:
    return event.end or event.start


def _busy_percent(row: Row) -> float:
    return 100 * row.busy_s / row.sampled_s if row.sampled_s else nan


def _spread(spans: Iterator[tuple[float, float, float]], first: float, width: float) -> list[float]:
    """Share out each (start, end, amount) over the bins in proportion to overlap."""
    bins = [0.0] * BINS
    for start, end, amount in spans:
        if end <= start:
            continue
        low = max(0, int((start - first) / width))
        high = min(BINS - 1, int((end - first) / width))
        for i in range(low, high + 1):
            left, right = first + i * width, first + (i + 1) * width
            bins[i] += amount * max(0.0, min(end, right) - max(start, left)) / (end - start)
    return bins


def _area(axes: Axes, rows: Sequence[Row], values: Sequence[float]) -> None:
    known = [value for value in values if value == value]
    if not known:
        plot.say_nothing(axes, "no load samples in this run")
        return
    minutes = [row.minutes for row in rows]
    colour = plot.MODEL_COLOURS["rl"]
    axes.fill_between(minutes, values, step="mid", color=colour, alpha=0.25, linewidth=0)
    axes.plot(minutes, values, drawstyle="steps-mid", color=colour, linewidth=1.4)
    axes.set_xlim(0, minutes[-1] + rows[-1].seconds / 120)
    axes.set_ylim(0, max(known) * 1.1 or 1)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if max(known) >= 10 else "{x:g}"))


FIGURE = Figure(
    name="throughput",
    title="Throughput",
    table=table,
    draw=draw,
    finding=finding,
    missing="No trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
