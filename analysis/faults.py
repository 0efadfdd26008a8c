"""Figure: what was lost, what broke, and how often the run was launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.run_files import Run
from analysis.steps import lineage

KINDS = {
    "lost trajectory": plot.ORANGE,
    "failed sandbox start": plot.PINK,
    "engine fault": plot.PURPLE,
    "drop": plot.BLUE,
    "undone step": plot.GREEN,
    "unreadable event line": plot.GREY,
}
"""What a row can count; `launch attempt` rows are in the table alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    kind: str
    cause: str
    count: int
    detail: str = ""
    """One example, in the words of what failed."""


def table(run: Run) -> list[Row]:
    """Count losses by kind and cause; a run without any still has its launch attempts."""
    lost = [e for e in run.of(events.TrajectoryEvent) if e.reward is None]
    starts = [e for e in run.of(events.SandboxStart) if not e.ok]
    faults = run.of(events.EngineFault)
    rows = _count("lost trajectory", [(e.cause, e.detail, 1) for e in lost])
    rows += _count("failed sandbox start", [(e.backend, e.detail, 1) for e in starts])
    rows += _count("engine fault", [(e.cause, e.detail, 1) for e in faults])
    rows += _count("drop", [(f"{e.what}: {e.reason}", "", e.count) for e in run.of(events.Drop)])
    if undone := lineage(run.events).superseded:
        rows.append(Row(kind="undone step", cause="done again after a resume", count=undone))
    rows += [
        Row(kind="unreadable event line", cause=reason, count=count)
        for reason, count in sorted(run.rejected.items())
    ]
    return rows + _attempts(run)


def losses(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that tell of a loss, the launch attempts left out."""
    return [row for row in rows if row.kind in KINDS]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    shown = losses(rows)
    figure, (axes,) = plot.grid(
        1, narrow=narrow, columns=1, height_in=0.8 + 0.38 * max(2, len(shown))
    )
    if not shown:
        plot.say_nothing(axes, "nothing was lost")
    else:
        _bars(axes, shown)
    plot.save(figure, path, png=not narrow)


def finding(rows: Sequence[Row]) -> str:
    shown = losses(rows)
    attempts = len(rows) - len(shown)
    launched = f"{attempts} launch attempt{'s' * (attempts != 1)} on record."
    if not shown:
        return f"Nothing was lost: no infrastructure failure, no engine fault, no drop. {launched}"
    sums: Counter[str] = Counter()
    for row in shown:
        sums[row.kind] += row.count
    parts = [f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in sums.items()]
    parts = [part.replace("trajectorys", "trajectories") for part in parts]
    return f"{', '.join(parts)}. {launched} No lost trajectory counts as a reward."


def _count(kind: str, found: Sequence[tuple[str, str, int]]) -> list[Row]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for cause, detail, count in found:
        counts[cause] += count
        examples.setdefault(cause, detail)
    return [
        Row(kind=kind, cause=cause, count=count, detail=examples[cause])
        for cause, count in counts.most_common()
    ]


def _attempts(run: Run) -> list[Row]:
    if run.ledger:
        return [
            Row(
                kind="launch attempt",
                cause=f"{line.attempt}: {line.began}, {line.ended}",
                count=1,
                detail=f"checkpoint step {line.step_begin} to {line.step_end}",
            )
            for line in run.ledger
        ]
    begun = {e.attempt: e for e in run.of(events.LaunchAttempt) if e.phase == "begin"}
    return [
        Row(kind="launch attempt", cause=f"{e.attempt}: {e.reason or 'began'}", count=1)
        for e in begun.values()
    ]


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row.kind}\n{row.cause[:44]}" for row in rows]
    counts = [row.count for row in rows]
    axes.barh(range(len(rows)), counts, color=[KINDS[row.kind] for row in rows], height=0.65)
    for place, count in enumerate(counts):
        axes.annotate(
            f"{count:,}", (count, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(counts) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("count")
    axes.grid(visible=False, axis="y")


FIGURE = Figure(
    name="faults",
    title="What was lost and why",
    table=table,
    draw=draw,
    finding=finding,
    missing="Nothing was lost, and no launch attempt is on record.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
