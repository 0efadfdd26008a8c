"""Figure: how the policy and the optimizer moved, step by step.

Dots are steps, lines the mean of a step and up to nine before it. Dashed lines mark resumes. A
value far out of the bulk (`plot.keep_in_view`) stands as a triangle at the edge with its number,
and the line leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentrl.events import Step
from analysis import plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import of_run

WINDOW = 10
"""Steps of the running mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step that counts; a metric that the trainer did not log is NaN."""

    step: int
    resumed: bool
    """A later launch attempt began with this step."""
    reward: float
    entropy: float
    grad_norm: float
    gap: float
    ess: float
    zero_signal: float
    staleness_mean: float
    staleness_max: float
    sampled_tokens: float
    trajectories: float
    response_tokens: float
    """Sampled tokens ÷ trajectories trained on."""
    loss: float
    clip_fraction: float
    capped: float
    lr: float
    groups: float


COMPUTED = ("step", "resumed", "response_tokens")
METRICS = [item.name for item in fields(Row) if item.name not in COMPUTED]
PANELS = (
    ("reward", "Reward", "mean of a step"),
    ("entropy", "Entropy", "nats a token"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("gap", "Trainer–engine gap", "|Δ log p| a token, nats"),
    ("ess", "Effective sample size", "share of tokens"),
    ("zero_signal", "Groups without signal", "groups a step"),
    ("staleness_mean", "Staleness", "versions behind, mean"),
    ("response_tokens", "Response length", "sampled tokens a trajectory"),
)


@remembered
def table(run: Run) -> list[Row]:
    """Return a row for each step that led to the newest weights."""
    line = of_run(run)
    after = {step + 1 for step in line.resumes}
    return [_row(step, is_resumed=step.step in after) for step in line.steps]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    """Draw a panel for each metric: dots are steps, the line is their running mean."""
    figure, all_axes = plot.grid(len(PANELS), narrow=narrow)
    for axes, (name, title, unit) in zip(all_axes, PANELS, strict=True):
        axes.set_title(title)
        axes.set_ylabel(unit)
        _curve(axes, rows, name)
    all_axes[-1].set_xlabel("step")
    if not narrow:
        all_axes[-2].set_xlabel("step")
    n = f"{len(rows)} steps; dots are steps, lines their mean over {WINDOW}"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    return _told("Mean reward", _mean(rows[:WINDOW], "reward"), newest(rows, "reward"))


def finding(rows: Sequence[Row]) -> str:
    """Say how reward and entropy went from the first to the last ten steps."""
    many = min(WINDOW, len(rows))
    parts = [
        _told(name, _mean(rows[:WINDOW], key), newest(rows, key))
        for name, key in (("Mean reward", "reward"), ("entropy", "entropy"))
    ]
    resumes = sum(row.resumed for row in rows)
    marks = f" Dashed lines mark {resumes} resume{'s' * (resumes != 1)}." if resumes else ""
    return (
        f"{' and '.join(parts)} (first and last {many} of n = {len(rows)} steps). "
        f"Dots are steps, lines running means over {WINDOW}.{marks}"
    )


def _row(step: Step, *, is_resumed: bool) -> Row:
    known = {name: step.metrics.get(name, nan) for name in METRICS}
    many = known["trajectories"]
    length = known["sampled_tokens"] / many if many else nan
    return Row(step=step.step, resumed=is_resumed, response_tokens=length, **known)


def _curve(axes: Axes, rows: Sequence[Row], name: str) -> None:
    known = [(row.step, value) for row in rows if (value := getattr(row, name)) == value]
    plot.gap_marks(axes, [row.step - 0.5 for row in rows if row.resumed])
    if not known:
        plot.say_nothing(axes, "not logged by this run")
        return
    steps, values = zip(*known, strict=True)
    axes.plot(steps, values, ".", color=plot.NAVY, alpha=0.5, markersize=4.5, markeredgewidth=0)
    axes.set_xlim(rows[0].step - 1, rows[-1].step + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    seen = plot.keep_in_view(axes, steps, values)
    line = plot.running_mean([value for _, value in seen], WINDOW)
    axes.plot([step for step, _ in seen], line, color=plot.MAIN, linewidth=1.8)


def _told(name: str, first: float, last: float) -> str:
    if isnan(first) or isnan(last):
        return f"{name} was not logged"
    return f"{name} went from {first:.2f} to {last:.2f}"


def newest(rows: Sequence[Row], name: str) -> float:
    """Return a metric's mean over the last steps, as where its line ends; NaN if not logged."""
    return _mean(rows[-WINDOW:], name)


def _mean(rows: Sequence[Row], name: str) -> float:
    known = [value for row in rows if (value := getattr(row, name)) == value]
    return sum(known) / len(known) if known else nan


FIGURE = Figure(
    name="training_curves",
    title="Training curves",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No optimizer step was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
