"""Figure: where the time of an optimizer step goes.

wait, logprob, update, publish and checkpoint are what the trainer measured; other is the rest of
the step's wall time. Means are over the steady state (see `steps.steady`). The trainer's idle
share is Σ wait ÷ Σ step seconds over the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis import plot
from analysis.figure import Figure
from analysis.run_files import Run
from analysis.steps import lineage, steady
from analysis.table import whole_percent

PARTS = ("wait", "logprob", "update", "publish", "checkpoint", "other")
NAMES = {
    "wait": "waiting for groups",
    "logprob": "log-probabilities",
    "update": "update",
    "publish": "publishing weights",
    "checkpoint": "checkpoint",
    "other": "other",
}
COLOURS = {
    "wait": plot.GREY,
    "logprob": plot.GREEN,
    "update": plot.ORANGE,
    "publish": plot.BLUE,
    "checkpoint": plot.PURPLE,
    "other": plot.PINK,
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
        return sum(parts(self).values())


def parts(row: Row) -> dict[str, float]:
    """Return the seconds of each part."""
    return {part: float(getattr(row, part)) for part in PARTS}


def table(run: Run) -> list[Row]:
    line = lineage(run.events)
    rows = []
    for step, counts in zip(line.steps, steady(line.steps, line.resumes), strict=True):
        known = (step.wait_s, step.logprob_s, step.update_s, step.publish_s, step.checkpoint_s)
        other = max(0.0, step.seconds - sum(known))
        times = dict(zip(PARTS, (*known, other), strict=True))
        rows.append(Row(step=step.step, steady=counts, **times))
    return rows


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean seconds of each part over the steady state."""
    counted = [row for row in rows if row.steady]
    return {part: sum(parts(row)[part] for row in counted) / len(counted) for part in PARTS}


def idle_share(rows: Sequence[Row]) -> float:
    """Return the share of its time that the trainer waited for groups."""
    mean = means(rows)
    return mean["wait"] / (sum(mean.values()) or 1.0)


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (bars, strip) = plot.grid(2, narrow=narrow, columns=1, height_in=2.4)
    mean = means(rows)
    shown = [part for part in PARTS if mean[part] > 0]
    plot.labelled_bars(
        bars,
        [NAMES[part] for part in shown],
        [mean[part] for part in shown],
        [COLOURS[part] for part in shown],
    )
    bars.set_title(f"Mean of a step: {sum(mean.values()):.2f} s")
    _strip(strip, rows)
    plot.save(figure, path, png=not narrow)


def finding(rows: Sequence[Row]) -> str:
    mean = means(rows)
    total = sum(mean.values())
    longest = max(mean, key=lambda part: mean[part])
    share = mean[longest] / total if total else 0.0
    return (
        f"A step took {total:.2f} s; most of it was {NAMES[longest]} "
        f"({whole_percent(share)}). The trainer was idle, waiting for groups, "
        f"{whole_percent(idle_share(rows))} of the time (steady state: "
        f"{sum(row.steady for row in rows)} of {len(rows)} steps)."
    )


def _strip(axes: Axes, rows: Sequence[Row]) -> None:
    steps = [row.step for row in rows]
    edges = [*(step - 0.5 for step in steps), steps[-1] + 0.5]
    bottom = [0.0] * len(rows)
    for part in PARTS:
        top = [low + parts(row)[part] for low, row in zip(bottom, rows, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[part], linewidth=0)
        bottom = top
    axes.set_title("Step by step")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")


FIGURE = Figure(
    name="step_time",
    title="Where a step's time goes",
    table=table,
    draw=draw,
    finding=finding,
    missing="No optimizer step was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
