"""Figure: where the time of one trajectory goes.

With S(p, i) the seconds of trajectory i's spans of phase p (model calls, commands, set-up, sandbox
start, grading), each number is the mean over the graded trajectories i that began in the steady
state: m(p) = Σᵢ S(p, i) ÷ n. A sandbox's span begins with its queueing, which is a phase of its
own. Other is what the phases leave of the trajectory's own span. Shares are m(p) ÷ Σ m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from agentrl import events
from analysis import plot
from analysis.columns import numbers
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.spans import Floats, Owners, owners_of
from analysis.steps import steady_from
from analysis.table import whole_percent

PHASES = ("queued", "setup", "sandbox_start", "model", "command", "grade", "other")
NAMES = {
    "queued": "queued for a sandbox",
    "setup": "image set-up",
    "sandbox_start": "sandbox start",
    "model": "model calls",
    "command": "commands",
    "grade": "grading",
    "other": "other",
}
COLOURS = dict(
    zip(
        PHASES,
        (plot.GREY, plot.NAVY, plot.SKY, plot.ORANGE, plot.GREEN, plot.PURPLE, plot.PINK),
        strict=True,
    )
)
SPANS: dict[str, type[events.Event]] = {
    "setup": events.Setup,
    "sandbox_start": events.SandboxStart,
    "model": events.ModelCall,
    "command": events.ToolCall,
    "grade": events.Grade,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One graded trajectory, seconds."""

    trajectory: str
    backend: str
    """Of its sandbox; empty if no start was recorded."""
    steady: bool
    turns: int
    queued: float
    setup: float
    sandbox_start: float
    model: float
    command: float
    grade: float
    other: float

    @property
    def total(self) -> float:
        return sum(parts(self).values())


def parts(row: Row) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {phase: float(getattr(row, phase)) for phase in PHASES}


@remembered
def table(run: Run) -> list[Row]:
    owners = owners_of(run)
    phases, backends = _phases(owners)
    begin = steady_from(run)
    rows = []
    for i, done in enumerate(run.of(events.TrajectoryEvent)):
        if done.reward is None or done.end <= 0:
            continue
        spent = {phase: float(sums[i]) for phase, sums in phases.items()}
        rows.append(
            Row(
                trajectory=done.trajectory,
                backend=backends[i],
                steady=done.start >= begin,
                turns=done.turns,
                other=max(0.0, done.seconds - sum(spent.values())),
                **spent,
            )
        )
    return rows


def counted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the steady state; all of them if there is none."""
    return [row for row in rows if row.steady] or list(rows)


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    some = counted(rows)
    return {phase: sum(float(getattr(row, phase)) for row in some) / len(some) for phase in PHASES}


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return each phase's share of the mean trajectory."""
    mean = means(rows)
    whole = sum(mean.values()) or 1.0
    return {phase: seconds / whole for phase, seconds in mean.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value under which `share` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (left, right) = plot.grid(2, narrow=narrow, height_in=2.6)
    mean = means(rows)
    shown = [phase for phase in PHASES if mean[phase] > 0]
    plot.time_bars(
        left,
        [NAMES[phase] for phase in shown],
        [mean[phase] for phase in shown],
        [COLOURS[phase] for phase in shown],
    )
    left.set_title("Mean of a trajectory")
    _spread(right, [row.total for row in counted(rows)])
    n = f"{len(counted(rows)):,} graded trajectories of the steady state, of {len(rows):,}"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    share = shares(rows)
    longest = max(share, key=lambda phase: share[phase])
    return f"{whole_percent(share[longest])} of a trajectory's time was {NAMES[longest]}"


def finding(rows: Sequence[Row]) -> str:
    some = counted(rows)
    totals = [row.total for row in some]
    return (
        f"{headline(rows)}. A trajectory took {plot.spoken(sum(means(rows).values()))} on average "
        f"(median {plot.spoken(quantile(totals, 0.5))}, 99th percentile "
        f"{plot.spoken(quantile(totals, 0.99))}; n = {len(some):,} graded ones of the steady "
        f"state, of {len(rows):,} in all)."
    )


def _phases(owners: Owners) -> tuple[dict[str, Floats], list[str]]:
    sums: dict[str, Floats] = {}
    backends = [""] * owners.count
    for phase, kind in SPANS.items():
        spans = owners.spans(kind)
        sums[phase] = owners.sums(spans, spans.seconds)
        if phase == "sandbox_start":
            queued = numbers(spans.table, "queued_s")
            sums["queued"] = owners.sums(spans, queued)
            sums[phase] = np.maximum(0.0, sums[phase] - sums["queued"])
            names = spans.table.column("backend").to_pylist()
            for owner, name in zip(spans.owner.tolist(), names, strict=True):
                if owner >= 0:
                    backends[owner] = name
    return {phase: sums[phase] for phase in PHASES if phase != "other"}, backends


def _spread(axes: Axes, totals: Sequence[float]) -> None:
    bins = min(40, max(5, len(totals) // 10))
    axes.hist(totals, bins=bins, color=plot.SKY, edgecolor=plot.NAVY, linewidth=0.5)
    axes.set_xlim(0, max(*totals, 1.5 * quantile(totals, 0.99)))
    for share, height in ((0.5, 0.99), (0.99, 0.86)):
        place = quantile(totals, share)
        axes.axvline(place, color=plot.INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{100 * share:.0f} % under {plot.spoken(place)}",
            (place, height),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            bbox={"facecolor": plot.PAPER, "edgecolor": "none", "pad": 1},
        )
    axes.set_title("How long trajectories took")
    axes.set_xlabel("seconds, start to reward")
    axes.set_ylabel("trajectories")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.grid(visible=False, axis="x")


FIGURE = Figure(
    name="trajectory_time",
    title="Where a trajectory's time goes",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No graded trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
