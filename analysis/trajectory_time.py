"""Figure: where the time of one trajectory goes.

A phase is the sum of its spans that carry the trajectory's id; a sandbox's span begins with its
queueing, which is taken out of it. Other is what is left of the trajectory's own span. Only graded
trajectories count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.run_files import Run
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
COLOURS = {
    "queued": plot.GREY,
    "setup": plot.GOLD,
    "sandbox_start": plot.BLUE,
    "model": plot.ORANGE,
    "command": plot.GREEN,
    "grade": plot.PURPLE,
    "other": plot.PINK,
}
Span = events.Setup | events.SandboxStart | events.ModelCall | events.ToolCall | events.Grade
SPANS: dict[type[events.Event], str] = {
    events.Setup: "setup",
    events.SandboxStart: "sandbox_start",
    events.ModelCall: "model",
    events.ToolCall: "command",
    events.Grade: "grade",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One graded trajectory, seconds."""

    trajectory: str
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


def table(run: Run) -> list[Row]:
    spent: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for event in run.events:
        if isinstance(event, Span):
            phases = spent[event.trajectory]
            phases[SPANS[type(event)]] += event.seconds
            if isinstance(event, events.SandboxStart):
                phases["queued"] += event.queued_s
                phases["sandbox_start"] -= event.queued_s
    rows = []
    for done in run.of(events.TrajectoryEvent):
        if done.reward is None:
            continue
        phases = spent[done.trajectory]
        phases["other"] = max(0.0, done.seconds - sum(phases.values()))
        rows.append(Row(trajectory=done.trajectory, turns=done.turns, **phases))
    return rows


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    return {phase: sum(parts(row)[phase] for row in rows) / len(rows) for phase in PHASES}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value under which `share` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (bars, spread) = plot.grid(2, narrow=narrow, height_in=2.6)
    mean = means(rows)
    shown = [phase for phase in PHASES if mean[phase] > 0]
    plot.labelled_bars(
        bars,
        [NAMES[phase] for phase in shown],
        [mean[phase] for phase in shown],
        [COLOURS[phase] for phase in shown],
    )
    bars.set_title(f"Mean of a trajectory: {sum(mean.values()):.2f} s")
    _spread(spread, rows)
    plot.save(figure, path, png=not narrow)


def finding(rows: Sequence[Row]) -> str:
    mean = means(rows)
    total = sum(mean.values())
    longest = max(mean, key=lambda phase: mean[phase])
    share = mean[longest] / total if total else 0.0
    totals = [row.total for row in rows]
    return (
        f"A trajectory took {total:.2f} s on average ({len(rows)} graded ones; median "
        f"{quantile(totals, 0.5):.2f} s, 99th percentile {quantile(totals, 0.99):.2f} s); most "
        f"of it was {NAMES[longest]} ({whole_percent(share)})."
    )


def _spread(axes: Axes, rows: Sequence[Row]) -> None:
    totals = [row.total for row in rows]
    bins = min(40, max(5, len(totals) // 10))
    axes.hist(totals, bins=bins, color=plot.MODEL_COLOURS["rl"], histtype="stepfilled")
    axes.set_xlim(0, max(*totals, 1.5 * quantile(totals, 0.99)))
    for share, height in ((0.5, 0.99), (0.99, 0.86)):
        place = quantile(totals, share)
        axes.axvline(place, color=plot.INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{100 * share:.0f} % under {place:.1f} s",
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
    table=table,
    draw=draw,
    finding=finding,
    missing="No graded trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
