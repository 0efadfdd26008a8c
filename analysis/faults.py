"""Figure: what was lost, what broke, and how often the run was launched.

Counts by kind, cause and hour (from the run's first event); a bar for each launch attempt. A lost
trajectory has no reward; had it counted as 0, its own reward and the mean of its group would have
been wrong: `false zero` rows count those rewards, and the groups that they would have spoilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import of_run

KINDS = {
    "lost trajectory": plot.ORANGE,
    "failed sandbox start": plot.NAVY,
    "engine fault": plot.SKY,
    "drop": plot.PURPLE,
    "undone step": plot.GOLD,
    "unreadable event line": plot.GREY,
}
"""What a row can count; rows of other kinds are in the table alone."""
SHOWN_CAUSES = 14
SHOWN_ATTEMPTS = 12
"""Launch attempts in the drawing, the last ones."""
UNTIMED = -1
NOT_LOST = ("cancelled", "ungraded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    kind: str
    cause: str
    count: int
    hour: int = UNTIMED
    """Since the run's first event; −1 where no time is known."""
    detail: str = ""
    """One example, in the words of what failed."""
    begin_h: float = nan
    """Of a launch attempt, hours since the run's first event."""
    end_h: float = nan


Told = tuple[str, str, int, float]
"""Cause, example, count, time."""


@remembered
def table(run: Run) -> list[Row]:
    """Count losses by kind, cause and hour; a run without any still has its launch attempts."""
    begin = run.store.span()[0]
    done = run.of(events.TrajectoryEvent)
    lost = [e for e in done if e.reward is None and e.cause != "ungraded"]
    starts = [e for e in run.of(events.SandboxStart) if not e.ok]
    faults, drops = run.of(events.EngineFault), run.of(events.Drop)
    rows = _count("lost trajectory", begin, ((e.cause, e.detail, 1, e.end) for e in lost))
    rows += _count("failed sandbox start", begin, ((e.backend, e.detail, 1, e.end) for e in starts))
    rows += _count(
        "engine fault", begin, ((e.cause, e.detail, 1, e.end or e.start) for e in faults)
    )
    told = ((f"{e.what}: {e.reason}", "", e.count, e.end or e.start) for e in drops)
    rows += _count("drop", begin, told)
    if undone := of_run(run).superseded:
        rows.append(Row(kind="undone step", cause="done again after a resume", count=undone))
    rows += [
        Row(kind="unreadable event line", cause=reason, count=count)
        for reason, count in sorted(run.rejected.items())
    ]
    return [*rows, *_false_zeros(done), *_attempts(run, begin)]


def losses(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that tell of a loss."""
    return [row for row in rows if row.kind in KINDS]


def by_cause(rows: Sequence[Row]) -> list[Row]:
    """Add up the hours of each kind and cause, in the order of kinds, the most frequent first."""
    sums: Counter[tuple[str, str]] = Counter()
    details: dict[tuple[str, str], str] = {}
    for row in rows:
        sums[row.kind, row.cause] += row.count
        details.setdefault((row.kind, row.cause), row.detail)
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(
        (
            Row(kind=kind, cause=cause, count=count, detail=details[kind, cause])
            for (kind, cause), count in sums.items()
        ),
        key=lambda row: (order.get(row.kind, len(order)), -row.count),
    )


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    shown = by_cause(losses(rows))[:SHOWN_CAUSES]
    timed = [row for row in losses(rows) if row.hour != UNTIMED]
    launched = [row for row in rows if row.kind == "launch attempt" and row.end_h > row.begin_h]
    panels: list[tuple[float, Callable[[Axes], None]]] = []
    if shown:
        row_in = plot.row_in(_causes(shown), narrow=narrow, least=0.32)
        panels.append((0.8 + row_in * len(shown), lambda axes: _bars(axes, shown)))
    if timed:
        panels.append((2.2, lambda axes: _hours(axes, timed)))
    if launched:
        few = launched[-SHOWN_ATTEMPTS:]
        row_in = plot.row_in(_launches(few), narrow=narrow, least=0.32)
        panels.append((0.9 + row_in * len(few), lambda axes: _lineage(axes, few)))
    if not panels:
        panels.append((0.8, lambda axes: plot.say_nothing(axes, "no time is known")))
    figure, all_axes = plot.column([height for height, _ in panels], narrow=narrow)
    for axes, (_, panel) in zip(all_axes, panels, strict=True):
        panel(axes)
    plot.save(figure, path, headline(rows), n=_n(rows), png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    sums: Counter[str] = Counter()
    for row in losses(rows):
        sums[row.kind] += row.count
    if not sums:
        return "Nothing was lost: no infrastructure failure, no engine fault, no drop"
    parts = [f"{count:,} {_plural(kind, count)}" for kind, count in sums.items()]
    return f"Lost or broken: {', '.join(parts)}"


def finding(rows: Sequence[Row]) -> str:
    attempts = sum(row.kind == "launch attempt" for row in rows)
    zeros = {row.cause: row.count for row in rows if row.kind == "false zero"}
    would = (
        f" Had lost trajectories counted as 0, {zeros['rewards']:,} rewards in "
        f"{zeros['groups']:,} groups would have been wrong; here they count as nothing."
        if zeros
        else ""
    )
    launched = f" {attempts} {_plural('launch attempt', attempts)} on record."
    return f"{headline(rows)}.{would}{launched}"


def _count(kind: str, begin: float, found: Iterable[Told]) -> list[Row]:
    counts: Counter[tuple[str, int]] = Counter()
    examples: dict[tuple[str, int], str] = {}
    for cause, detail, count, at in found:
        hour = int((at - begin) // 3600) if at > 0 else UNTIMED
        counts[cause, hour] += count
        examples.setdefault((cause, hour), detail)
    return [
        Row(kind=kind, cause=cause, count=count, hour=hour, detail=examples[cause, hour])
        for (cause, hour), count in counts.most_common()
    ]


def _false_zeros(done: Sequence[events.TrajectoryEvent]) -> Iterator[Row]:
    lost = [each for each in done if each.reward is None and each.cause not in NOT_LOST]
    if lost:
        groups = len({each.draw for each in lost})
        yield Row(kind="false zero", cause="rewards", count=len(lost))
        yield Row(kind="false zero", cause="groups", count=groups)


def _attempts(run: Run, begin: float) -> list[Row]:
    if run.ledger:
        return [
            _attempt(
                f"{line.attempt}: {line.began}, {line.ended}",
                f"checkpoint step {line.step_begin} to {line.step_end}",
                (line.started - begin, line.finished - begin),
            )
            for line in run.ledger
        ]
    told = run.of(events.LaunchAttempt)
    begun = {e.attempt: e for e in told if e.phase == "begin"}
    ended = {e.attempt: e for e in told if e.phase == "end"}
    rows = []
    for number, event in begun.items():
        end = ended.get(number)
        cause = f"{number}: {event.reason or 'began'}{f', {end.reason}' if end else ''}"
        until = (end.end or end.start) if end else nan
        rows.append(_attempt(cause, "", (event.start - begin, until - begin)))
    return rows


def _attempt(cause: str, detail: str, span: tuple[float, float]) -> Row:
    begin_h, end_h = (seconds / 3600 for seconds in span)
    return Row(
        kind="launch attempt", cause=cause, count=1, detail=detail, begin_h=begin_h, end_h=end_h
    )


def _lineage(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw when each launch attempt held its nodes, and why it began and ended."""
    for place, row in enumerate(rows):
        axes.barh(
            place, row.end_h - row.begin_h, left=row.begin_h, height=0.6, color=plot.SKY,
            edgecolor=plot.INK, linewidth=0.4,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), plot.fitting(axes, _launches(rows)))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title("Launch attempts")
    axes.set_xlabel("hours since the first event")
    axes.grid(visible=False, axis="y")


def _launches(rows: Sequence[Row]) -> list[str]:
    return [f"{row.cause} ({row.detail})" if row.detail else row.cause for row in rows]


def _n(rows: Sequence[Row]) -> str:
    many = sum(row.count for row in losses(rows))
    attempts = sum(row.kind == "launch attempt" for row in rows)
    return f"{many:,} {_plural('loss', many)}, {attempts} {_plural('launch attempt', attempts)}"


def _causes(rows: Sequence[Row]) -> list[str]:
    return [f"{row.kind}: {plot.plain(row.cause, 38)}" for row in rows]


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    plot.bars(
        axes,
        _causes(rows),
        [row.count for row in rows],
        [f"{row.count:,}" for row in rows],
        colours=[KINDS[row.kind] for row in rows],
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("count")
    axes.set_title("By cause")


def _hours(axes: Axes, rows: Sequence[Row]) -> None:
    last = max(row.hour for row in rows)
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    layers = []
    for kind in kinds:
        counts = [0.0] * (last + 1)
        for row in rows:
            if row.kind == kind:
                counts[row.hour] += row.count
        layers.append((kind, KINDS[kind], counts))
    plot.stack(axes, [float(hour) for hour in range(last + 2)], layers)
    axes.set_xlabel("hours since the first event")
    axes.set_ylabel("count in the hour")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=plot.TICKS))


def _plural(name: str, count: int) -> str:
    if count == 1:
        return name
    if name.endswith("y"):
        return f"{name.removesuffix('y')}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


FIGURE = Figure(
    name="faults",
    title="What was lost and why",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="Nothing was lost, and no launch attempt is on record.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
