"""Figure: how much work the run did at a time.

Time, from the first trajectory's start to the last one's end or within the window that is given, is
cut into equal bins. Trajectories an hour: those that ended in the bin ÷ its length.
Concurrent: mean number of trajectories under way. Model-call latency: median and 95th percentile
of the calls that ended in the bin. Engine busy share and tokens a second: growth of `busy_s` and
`generated_tokens` between load samples of one engine, over the time between them, spread over the
bins that they cover; busy is the mean over engines. An engine that began anew, by its states or by
a counter that fell, begins a new row of samples. The idle share is 1 − Σ busy ÷ Σ time sampled.
Without load samples, tokens a second are those of `engine_metrics`, or of the model calls. Running,
queued and KV use: a sample (`engine_metrics`, else a load sample) holds until its engine's next
one, for three usual gaps at most; means over the bin's time, all engines added up; KV use is
averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from agentrl import events
from analysis import plot
from analysis.columns import numbers
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.spans import Floats
from analysis.table import whole_percent

BINS = 60
ENDS = ("starting", "stopped", "failed")
"""States between which an engine's counters do not go on."""
HELD_GAPS = 3
"""Usual gaps between samples for which one holds at most: of an engine that is down none does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One bin of time; what no event tells is NaN."""

    minutes: float
    """Middle of the bin since the first trajectory's start."""
    seconds: float
    """Length of the bin."""
    trajectories: int
    """Ended in the bin."""
    concurrent: float
    calls: int
    """Model calls that ended in the bin."""
    latency_p50: float
    """Of those calls, seconds."""
    latency_p95: float
    busy_s: float
    """Engine-seconds of computing; NaN without load samples."""
    sampled_s: float
    """Engine-seconds that load samples cover."""
    tokens: float
    """Sampled by the engines."""
    running: float
    """Requests that the engines decode, mean."""
    queued: float
    """Requests that wait in the engines, mean."""
    kv_use: float
    """Share of the KV cache in use, mean over engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What one engine did between two load samples."""

    start: float
    end: float
    busy_s: float
    tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Equal pieces of the time from the first trajectory's start to the last one's end."""

    first: float
    width: float

    def place(self, at: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the bin of each time; times outside fall into the bins at the ends."""
        return np.clip((at - self.first) // self.width, 0, BINS - 1).astype(np.int64)

    def spread(self, start: Floats, end: Floats, amount: Floats) -> Floats:
        """Share out each amount over the bins in proportion to overlap."""
        lasting = end > start
        low, high = start[lasting] - self.first, end[lasting] - self.first
        rate = amount[lasting] / (high - low)
        edges: Floats = np.arange(BINS + 1, dtype=np.float64) * self.width
        return np.asarray(np.diff(_ramp(edges, low, rate) - _ramp(edges, high, rate)))

    def mean(self, start: Floats, end: Floats, value: Floats) -> Floats:
        """Return in each bin the mean of values that held from start to end; NaN where none did."""
        covered = self.spread(start, end, end - start)
        summed = self.spread(start, end, value * (end - start))
        return np.where(covered > 1e-9, summed / np.maximum(covered, 1e-9), nan)


@remembered
def table(run: Run) -> list[Row]:
    done = run.store.table(events.TrajectoryEvent)
    start, end = numbers(done, "start"), numbers(done, "end")
    start, end = start[end > 0], end[end > 0]
    if not len(end):
        return []
    since, until = run.store.bounds
    first = max(since, float(start.min()))
    bins = Bins(first=first, width=max(1.0, min(until, float(end.max())) - first) / BINS)
    under_way = bins.spread(start, end, end - start)
    ended = np.bincount(bins.place(end), minlength=BINS)
    calls = _calls(run, bins)
    loads = _loads(run, bins)
    tokens = np.where(np.isnan(loads["tokens"]), calls["tokens"], loads["tokens"])
    return [
        Row(
            minutes=(i + 0.5) * bins.width / 60,
            seconds=bins.width,
            trajectories=int(ended[i]),
            concurrent=float(under_way[i] / bins.width),
            calls=int(calls["calls"][i]),
            latency_p50=float(calls["p50"][i]),
            latency_p95=float(calls["p95"][i]),
            busy_s=float(loads["busy_s"][i]),
            sampled_s=float(loads["sampled_s"][i]),
            tokens=float(tokens[i]),
            running=float(loads["running"][i]),
            queued=float(loads["waiting"][i]),
            kv_use=float(loads["kv_use"][i]),
        )
        for i in range(BINS)
    ]


def intervals(states: Sequence[events.EngineState]) -> Iterator[Interval]:
    """Yield what each engine did between two load samples of one life of it.

    states: ordered by time. A new life is told by its states, or by a counter that fell.
    """
    last: dict[str, events.EngineState] = {}
    for new in states:
        if new.state in ENDS:
            last.pop(new.engine, None)
        if new.state != "load":
            continue
        old, last[new.engine] = last.get(new.engine, new), new
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


def concurrent(rows: Sequence[Row]) -> float:
    """Return how many trajectories were under way, mean over the whole time."""
    return sum(row.concurrent for row in rows) / len(rows)


def idle_share(rows: Sequence[Row]) -> float:
    """Return the share of their time that engines computed nothing; NaN if unknown."""
    known = [row for row in rows if row.busy_s == row.busy_s]
    sampled = sampled_s(rows)
    return 1 - sum(row.busy_s for row in known) / sampled if sampled else nan


def sampled_s(rows: Sequence[Row]) -> float:
    """Return the engine-seconds that load samples tell of."""
    return sum(row.sampled_s for row in rows if row.busy_s == row.busy_s)


def tokens_per_s(rows: Sequence[Row]) -> float:
    """Return sampled tokens a second over the bins that tell of them; NaN if none does."""
    known = [row for row in rows if row.tokens == row.tokens]
    seconds = sum(row.seconds for row in known)
    return sum(row.tokens for row in known) / seconds if seconds else nan


def latency(rows: Sequence[Row]) -> float:
    """Return the typical model call's seconds: the mean over calls of their bin's median."""
    known = [row for row in rows if row.calls]
    calls = sum(row.calls for row in known)
    return sum(row.latency_p50 * row.calls for row in known) / calls if calls else nan


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    panels = [
        ("Trajectories an hour", "ended, 1/h", [3600 * r.trajectories / r.seconds for r in rows]),
        ("Concurrent trajectories", "under way, mean", [r.concurrent for r in rows]),
        ("Model-call latency", "seconds, median", [r.latency_p50 for r in rows]),
        ("Sampled tokens", "tokens/s", [r.tokens / r.seconds for r in rows]),
        ("Engines busy", "% of their time", [_busy_percent(r) for r in rows]),
        ("Running and queued", "requests, mean", [r.running for r in rows]),
        ("KV cache in use", "%, mean of engines", [100 * r.kv_use for r in rows]),
    ]
    panels = [panel for panel in panels if any(value == value for value in panel[2])]
    figure, all_axes = plot.grid(len(panels), narrow=narrow, height_in=1.9)
    for axes, (title, unit, values) in zip(all_axes, panels, strict=True):
        axes.set_title(title)
        axes.set_ylabel(unit)
        _area(axes, rows, values)
        if title == "Model-call latency":
            _second(axes, rows, [r.latency_p95 for r in rows], "95th percentile")
        if title == "Running and queued":
            _second(axes, rows, [r.queued for r in rows], "queued")
        if unit.startswith("%"):
            axes.set_ylim(0, 100)
    for axes in all_axes[-1:] if narrow else all_axes[-2:]:
        axes.set_xlabel("minutes since the first trajectory")
    n = f"{sum(row.trajectories for row in rows):,} trajectories, {BINS} bins of time"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    return (
        f"{per_hour(rows):,.0f} trajectories an hour, {concurrent(rows):,.0f} under way on average"
    )


def finding(rows: Sequence[Row]) -> str:
    idle, rate, wait = idle_share(rows), tokens_per_s(rows), latency(rows)
    sampled = f" {rate:,.0f} tokens a second were sampled." if rate == rate else ""
    waited = f" A model call took {plot.spoken(wait)} (median)." if wait == wait else ""
    engines = (
        f" Engines were idle {whole_percent(idle)} of the time."
        if idle == idle
        else " Engines wrote no load samples, so their idle share is unknown."
    )
    many = sum(row.trajectories for row in rows)
    return f"{headline(rows)} (n = {many:,}).{engines}{sampled}{waited}"


def _ramp(edges: Floats, begin: Floats, rate: Floats) -> Floats:
    """Return Σ rate × (edge − begin) over what has begun, for each edge."""
    order = np.argsort(begin)
    rates = np.concatenate([[0.0], np.cumsum(rate[order])])
    moments = np.concatenate([[0.0], np.cumsum((rate * begin)[order])])
    place = np.searchsorted(begin[order], edges)
    return np.asarray(edges * rates[place] - moments[place])


def _calls(run: Run, bins: Bins) -> dict[str, Floats]:
    calls = run.store.table(events.ModelCall)
    found = {name: np.full(BINS, nan) for name in ("p50", "p95", "tokens")}
    found["calls"] = np.zeros(BINS)
    if not len(calls):
        return found
    start, end = numbers(calls, "start"), numbers(calls, "end")
    place = bins.place(end)
    found["calls"] = np.bincount(place, minlength=BINS).astype(np.float64)
    found["tokens"] = bins.spread(start, end, numbers(calls, "new_tokens"))
    order = np.argsort(place, kind="stable")
    cuts = np.cumsum(found["calls"]).astype(np.int64)[:-1]
    for i, some in enumerate(np.split((end - start)[order], cuts)):
        if len(some):
            found["p50"][i], found["p95"][i] = np.quantile(some, (0.5, 0.95))
    return found


def _loads(run: Run, bins: Bins) -> dict[str, Floats]:
    found = _grown(list(intervals(run.of(events.EngineState))), bins)
    samples = [_sample(state) for state in run.of(events.EngineState) if state.state == "load"]
    metrics = run.of(events.EngineMetrics)
    told = [_Sample(_at(m), m.engine, m.running, m.queued, m.token_usage) for m in metrics]
    with_metrics = {sample.engine for sample in told}
    told += [sample for sample in samples if sample.engine not in with_metrics]
    if metrics and np.isnan(found["tokens"]).all():
        found["tokens"] = _rates(metrics, bins)
    engines = len({sample.engine for sample in told})
    held = list(_held(told))
    start, end = (np.array([each[i] for each in held], np.float64) for i in (0, 1))
    for name, times in (("running", engines), ("waiting", engines), ("kv_use", 1)):
        value = np.array([getattr(sample, name) for _, _, sample in held], np.float64)
        known = value == value
        found[name] = bins.mean(start[known], end[known], value[known]) * times
    return found


def _held(told: Sequence[_Sample]) -> Iterator[tuple[float, float, _Sample]]:
    """Yield how long each sample holds: until its engine's next one, or a few usual gaps."""
    by_engine: dict[str, list[_Sample]] = defaultdict(list)
    for sample in told:
        by_engine[sample.engine].append(sample)
    for some in by_engine.values():
        longest = _longest([sample.at for sample in some])
        for sample, later in pairwise(some):
            yield sample.at, min(later.at, sample.at + longest), sample


def _longest(times: Sequence[float]) -> float:
    """Return how long a sample holds at most, by the times of its engine's samples."""
    return HELD_GAPS * median(new - old for old, new in pairwise(times)) if times[1:] else 0.0


class _Sample(NamedTuple):
    at: float
    engine: str
    running: float
    waiting: float
    kv_use: float


def _sample(state: events.EngineState) -> _Sample:
    return _Sample(_at(state), state.engine, state.running, state.waiting, nan)


def _grown(grown: Sequence[Interval], bins: Bins) -> dict[str, Floats]:
    start, end, busy, tokens = (
        np.array([getattr(each, name) for each in grown], np.float64)
        for name in ("start", "end", "busy_s", "tokens")
    )
    covered = bins.spread(start, end, end - start)
    found = {"sampled_s": covered}
    for name, amount in (("busy_s", busy), ("tokens", tokens)):
        known = (covered > 1e-9) & bool(amount.any())
        found[name] = np.where(known, bins.spread(start, end, amount), nan)
    return found


def _rates(metrics: Sequence[events.EngineMetrics], bins: Bins) -> Floats:
    """Return tokens a bin from the rates that engines report, each until its next report."""
    by_engine: dict[str, list[events.EngineMetrics]] = defaultdict(list)
    for each in metrics:
        by_engine[each.engine].append(each)
    pairs = [pair for some in by_engine.values() for pair in pairwise(some)]
    start = np.array([_at(old) for old, _ in pairs], np.float64)
    end = np.array([_at(new) for _, new in pairs], np.float64)
    rate = np.array([new.throughput for _, new in pairs], np.float64)
    return bins.spread(start, end, rate * (end - start))


def _at(event: events.Event) -> float:
    return event.end or event.start


def _busy_percent(row: Row) -> float:
    return 100 * row.busy_s / row.sampled_s if row.sampled_s else nan


def _area(axes: Axes, rows: Sequence[Row], values: Sequence[float]) -> None:
    known = [value for value in values if value == value]
    minutes = [row.minutes for row in rows]
    axes.fill_between(minutes, values, step="mid", color=plot.SKY, alpha=0.6, linewidth=0)
    axes.plot(minutes, values, drawstyle="steps-mid", color=plot.NAVY, linewidth=1.4)
    axes.set_xlim(0, minutes[-1] + rows[-1].seconds / 120)
    axes.set_ylim(0, max(known) * 1.1 or 1)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if max(known) >= 10 else "{x:g}"))


def _second(axes: Axes, rows: Sequence[Row], values: Sequence[float], name: str) -> None:
    minutes = [row.minutes for row in rows]
    axes.plot(
        minutes,
        values,
        drawstyle="steps-mid",
        color=plot.MAIN,
        linewidth=1.1,
        linestyle=(0, (4, 2)),
        label=name,
    )
    known = [value for value in values if value == value]
    axes.set_ylim(top=1.25 * max(axes.get_ylim()[1] / 1.1, max(known, default=0)))
    axes.legend(loc="upper right", borderaxespad=0)


FIGURE = Figure(
    name="throughput",
    title="Throughput",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
