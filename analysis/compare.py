"""Figure: two runs side by side, the numbers that matter before and after.

The ratio is second ÷ first. Differences of solve rates are paired by task over the tasks that both
runs graded, with a 95 % interval from `agentrl.estimators.paired_difference`; where that interval
holds 0 the two are not told apart. Speed ratios have no interval: they are of one run each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, log2, nan
from pathlib import Path

from agentrl import events
from agentrl.estimators import paired_difference
from analysis import (
    long_tail,
    plot,
    sandbox_time,
    solve_rate,
    step_time,
    throughput,
    trajectory_time,
)
from analysis.evaluations import model_label
from analysis.figure import Figure
from analysis.run_files import Run, load_run

TICKS = (0.125, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 8)
LOOKS: dict[bool | None, tuple[str, str]] = {
    True: ("^", plot.GREEN),
    False: ("v", plot.ORANGE),
    None: ("o", plot.GREY),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measure of both runs."""

    measure: str
    unit: str
    first: float
    second: float
    low: float = nan
    high: float = nan
    """95 % interval of second − first, where it can be known."""
    first_n: int = 0
    second_n: int = 0
    better: str = ""
    """`more` or `less`; empty where neither is."""

    @property
    def ratio(self) -> float:
        return self.second / self.first if self.first else nan

    @property
    def is_alike(self) -> bool:
        """It is neither better nor worse: no side is, under 2 %, or an interval that holds 0."""
        return not self.better or abs(self.ratio - 1) < 0.02 or self.low <= 0 <= self.high

    @property
    def spoken_difference(self) -> str:
        if self.low == self.low:
            return f"{self.second - self.first:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"
        return f"× {self.ratio:.2f}" if isfinite(self.ratio) else ""


def table(first: Run, second: Run) -> list[Row]:
    """Return what both runs tell of."""
    before, after = dict(_measures(first)), dict(_measures(second))
    rows = []
    for name, (value, n, unit, better) in before.items():
        if name in after and value == value and after[name][0] == after[name][0]:
            rows.append(
                Row(
                    measure=name,
                    unit=unit,
                    first=value,
                    second=after[name][0],
                    first_n=n,
                    second_n=after[name][1],
                    better=better,
                )
            )
    return [*rows, *_rates(first, second)]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    shown = [row for row in rows if row.first > 0 and row.second > 0]
    names = [row.measure for row in shown]
    row_in = plot.row_in(names, narrow=narrow, least=0.3)
    figure, (axes,) = plot.grid(1, narrow=narrow, columns=1, height_in=1.0 + row_in * len(shown))
    for place, row in enumerate(shown):
        good = None if row.is_alike else (row.ratio > 1) == (row.better == "more")
        marker, colour = LOOKS[good]
        at = log2(row.ratio)
        axes.plot([0, at], [place, place], color=plot.MUTED, linewidth=1.2)
        axes.plot(at, place, marker, color=colour, markersize=7, markeredgecolor=plot.INK)
        axes.annotate(
            f"× {row.ratio:.2f}",
            (at, place),
            xytext=(8 if at >= 0 else -8, 0),
            textcoords="offset points",
            ha="left" if at >= 0 else "right",
            va="center",
            fontsize=8.5,
        )
    reach = max((abs(log2(row.ratio)) for row in shown), default=1.0) or 1.0
    reach *= 1.7 if narrow else 1.35  # room for the numbers
    axes.set_xlim(-reach, reach)
    ticks = [ratio for ratio in TICKS if abs(log2(ratio)) <= reach]
    axes.set_xticks([log2(ratio) for ratio in ticks], [f"× {ratio:g}" for ratio in ticks])
    axes.axvline(0, color=plot.INK, linewidth=1)
    axes.set_yticks(range(len(shown)), plot.fitting(axes, names))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("second ÷ first; ▲ is better, ▼ worse, ● neither")
    axes.grid(visible=False, axis="y")
    n = f"{len(shown)} measures of two runs; those of each in the table"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    found = {row.measure: row for row in rows}
    rate = found.get("trajectories an hour")
    return (
        f"Trajectories an hour: {rate.first:,.0f} → {rate.second:,.0f}, × {rate.ratio:.2f}"
        if rate
        else f"{len(rows)} measures that both runs tell of"
    )


def finding(rows: Sequence[Row]) -> str:
    apart = [row for row in rows if row.low == row.low]
    told = [
        f"{row.measure}: {row.spoken_difference} points"
        + (" (not told apart)" if row.low <= 0 <= row.high else "")
        for row in apart[:4]
    ]
    more = f" {'; '.join(told)}." if told else ""
    return f"{headline(rows)}.{more} n of each measure is in the table."


Measure = tuple[float, int, str, str]


def _measures(run: Run) -> Iterator[tuple[str, Measure]]:
    done = len(run.store.table(events.TrajectoryEvent))
    rows = throughput.table(run)
    if rows:
        calls = sum(row.calls for row in rows)
        yield "trajectories an hour", (throughput.per_hour(rows), done, "1/h", "more")
        yield "concurrent trajectories", (throughput.concurrent(rows), done, "mean", "")
        yield "model-call latency", (throughput.latency(rows), calls, "s, median", "less")
        yield "sampled tokens a second", (throughput.tokens_per_s(rows), calls, "1/s", "more")
        yield "engines idle", (100 * throughput.idle_share(rows), done, "%", "less")
    steps = step_time.table(run)
    if steps:
        n = sum(row.steady for row in steps)
        mean = step_time.means(steps)
        yield "step time", (step_time.step_seconds(steps), n, "s", "less")
        for part in ("update", "wait", "logprob", "publish"):
            yield f"step: {step_time.NAMES[part]}", (mean[part], n, "s", "less")
        yield "trainer idle", (100 * step_time.idle_share(steps), n, "%", "less")
    times = trajectory_time.table(run)
    if times:
        mean, n = trajectory_time.means(times), len(trajectory_time.counted(times))
        yield "trajectory time", (sum(mean.values()), n, "s", "less")
    tails = long_tail.table(run)
    if tails:
        yield "tail share", (100 * long_tail.tail_share(tails), len(tails), "%", "less")
    for row in sandbox_time.table(run):
        yield f"sandbox {row.phase}, median", (row.median, row.n, "s", "less")
        yield f"sandbox {row.phase}, 99th percentile", (row.p99, row.n, "s", "less")


def _rates(first: Run, second: Run) -> Iterator[Row]:
    """Pair the evaluations of the same model, split and temperature."""
    after = {(each.model, each.split, each.temperature): each for each in second.evaluations}
    for old in first.evaluations:
        new = after.get((old.model, old.split, old.temperature))
        if new is None or not old.per_task.keys() & new.per_task.keys() or 1 not in old.pass_at:
            continue
        gain = paired_difference(solve_rate.as_summary(old), solve_rate.as_summary(new))
        shared = old.per_task.keys() & new.per_task.keys()
        value = 100 * sum(old.per_task[task] for task in shared) / len(shared)
        yield Row(
            measure=f"pass@1 {model_label(old.model)}, {old.split}, T={old.temperature:g}",
            unit="%",
            first=value,
            second=value + 100 * gain.value,
            low=100 * gain.low,
            high=100 * gain.high,
            first_n=old.tasks,
            second_n=gain.tasks,
            better="more",
        )


def _alone(run: Run) -> Sequence[Row]:
    """A comparison needs two runs; alone, a run is compared with itself."""
    return table(run, run)


FIGURE = Figure(
    name="compare",
    title="Before and after",
    row=Row,
    table=_alone,
    draw=draw,
    finding=finding,
    missing="The two runs tell of nothing that can be compared.",
)


def main(argv: Sequence[str]) -> int:
    """Write report/compare.* of the first run named, against the second."""
    if len(argv) != 2:
        print("usage: python -m analysis.compare FIRST_RUN SECOND_RUN")
        return 2
    first, second = (load_run(Path(name)) for name in argv)
    written = FIGURE.write_rows(table(first, second), first.report)
    print(f"{first.report / 'compare'}.png .svg .csv: {written.finding}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
