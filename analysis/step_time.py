"""Figure: where the time of an optimizer step goes.

A step's time is T = update + wait + logprob + other: what the trainer measured, and other = its
span less all that was measured, at least 0. Publishing weights and writing checkpoints stand apart
and are never inside T. Means are over the steady state (`steps.steady`) or a window of it; the
trainer's idle share is Σ wait ÷ Σ (T + publish + checkpoint) over the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis import plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import of_run, steady
from analysis.table import whole_percent

INSIDE = ("update", "wait", "logprob", "other")
APART = ("publish", "checkpoint")
PARTS = (*INSIDE, *APART)
NAMES = {
    "wait": "waiting for groups",
    "logprob": "log-probabilities",
    "update": "the update",
    "publish": "apart: publishing weights",
    "checkpoint": "apart: checkpoint",
    "other": "other work",
}
COLOURS = {
    "update": plot.NAVY,
    "wait": plot.GREY,
    "logprob": plot.GREEN,
    "other": plot.PINK,
    "publish": plot.PURPLE,
    "checkpoint": plot.GOLD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step that counts, seconds."""

    step: int
    steady: bool
    wait: float
    logprob: float
    update: float
    publish: float
    checkpoint: float
    other: float

    @property
    def total(self) -> float:
        """The step's own time: publishing and checkpoints are apart."""
        return sum(float(getattr(self, part)) for part in INSIDE)


def parts(row: Row) -> dict[str, float]:
    """Return the seconds of each part."""
    return {part: float(getattr(row, part)) for part in PARTS}


@remembered
def table(run: Run) -> list[Row]:
    line = of_run(run)
    rows = []
    for step, counts in zip(line.steps, steady(line.steps, line.resumes), strict=True):
        times = {
            "wait": step.wait_s,
            "logprob": step.logprob_s,
            "update": step.update_s,
            "publish": step.publish_s,
            "checkpoint": step.checkpoint_s,
        }
        other = max(0.0, step.seconds - sum(times.values()))
        rows.append(Row(step=step.step, steady=counts, other=other, **times))
    return rows


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean seconds of each part over the steady state."""
    counted = [row for row in rows if row.steady]
    return {part: sum(parts(row)[part] for row in counted) / len(counted) for part in PARTS}


def step_seconds(rows: Sequence[Row]) -> float:
    """Return the mean time of a step, publishing and checkpoints apart."""
    mean = means(rows)
    return sum(mean[part] for part in INSIDE)


def idle_share(rows: Sequence[Row]) -> float:
    """Return the share of its time that the trainer waited for groups."""
    mean = means(rows)
    return mean["wait"] / (sum(mean.values()) or 1.0)


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (bars, strip) = plot.grid(2, narrow=narrow, columns=1, height_in=2.5)
    mean = means(rows)
    shown = shown_parts(mean)
    whole = step_seconds(rows) or 1.0
    labels = [
        plot.spoken(mean[part])
        + ("" if part in APART else f" · {whole_percent(mean[part] / whole)}")
        for part in shown
    ]
    plot.bars(
        bars,
        [NAMES[part] for part in shown],
        [mean[part] for part in shown],
        labels,
        colours=[COLOURS[part] for part in shown],
    )
    bars.set_xlabel("seconds a step, mean of the steady state")
    _strip(strip, rows)
    n = f"{sum(row.steady for row in rows)} steps of the steady state, of {len(rows)} that count"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    mean = means(rows)
    longest = max(INSIDE, key=lambda part: mean[part])
    whole = step_seconds(rows)
    share = mean[longest] / whole if whole else 0.0
    return f"A step took {plot.spoken(whole)}; {whole_percent(share)} of it was {NAMES[longest]}"


def finding(rows: Sequence[Row]) -> str:
    mean = means(rows)
    apart = mean["publish"] + mean["checkpoint"]
    return (
        f"{headline(rows)}. Publishing and checkpoints took {plot.spoken(apart)} apart from it. "
        f"The trainer was idle, waiting for groups, {whole_percent(idle_share(rows))} of the time "
        f"(steady state: n = {sum(row.steady for row in rows)} of {len(rows)} steps)."
    )


def shown_parts(mean: dict[str, float]) -> list[str]:
    """Return the parts that are over a thousandth of all."""
    return [part for part in PARTS if mean[part] > 0.001 * sum(mean.values())]


def _strip(axes: Axes, rows: Sequence[Row]) -> None:
    edges = [*(row.step - 0.5 for row in rows), rows[-1].step + 0.5]
    mean = means(rows)
    layers = [
        (NAMES[part], COLOURS[part], [float(getattr(row, part)) for row in rows])
        for part in shown_parts(mean)
    ]
    plot.stack(axes, edges, layers)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


FIGURE = Figure(
    name="step_time",
    title="Where a step's time goes",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No optimizer step was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
