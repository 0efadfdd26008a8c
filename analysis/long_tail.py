"""Figure: how long the last attempts keep a batch, and what a cap would have cost and saved.

A batch is the trajectories of `groups_per_step` draws in a row (one step's). With t₀ its first
start, t₉₀ the time at which 90 % of them have ended (nearest rank, the ⌈0.9 n⌉-th end) and t₁₀₀ its
last end, the tail share is Σ (t₁₀₀ − t₉₀) ÷ Σ (t₁₀₀ − t₀) over batches. With several launch
attempts a batch that a crash cut is told by its gap and counts as two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import groups_per_step
from analysis.table import whole_percent

DONE = 0.9
SHOWN_BATCHES = 2
SHOWN_ROWS = 24
LIMITS = {
    "turn_limit": "at the turn limit",
    "token_limit": "at the token limit",
    "time_limit": "at the time limit",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trajectory in its batch; seconds count from the batch's first start."""

    batch: int
    draw: int
    attempt: int
    task: str
    start: float
    end: float
    cause: str
    reward: float | None
    turns: int
    tokens: int
    shown: bool
    """It is in the Gantt chart."""

    @property
    def is_solved(self) -> bool:
        return self.reward is not None and self.reward > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """One batch's times, seconds from its first start."""

    batch: int
    n: int
    t90: float
    t100: float

    @property
    def share(self) -> float:
        return (self.t100 - self.t90) / self.t100 if self.t100 else 0.0


@remembered
def table(run: Run) -> list[Row]:
    size = groups_per_step(run)
    batches: dict[int, list[events.TrajectoryEvent]] = defaultdict(list)
    for done in run.of(events.TrajectoryEvent):
        if done.end > 0:  # an adapter's may have no times
            batches[done.draw // size].append(done)
    parts = [part for _, some in sorted(batches.items()) for part in _unbroken(some)]
    begins = [min(done.start for done in part) for part in parts]
    shown = _chosen([tail(part, i) for i, part in enumerate(map(_ends, parts))])
    rows = []
    for number, (begin, part) in enumerate(zip(begins, parts, strict=True)):
        slowest = max(part, key=lambda done: done.end).draw
        for done in sorted(part, key=lambda done: (done.draw, done.attempt, done.start)):
            is_near = done.draw == slowest or len(part) <= SHOWN_ROWS
            rows.append(
                Row(
                    batch=number,
                    draw=done.draw,
                    attempt=done.attempt,
                    task=done.task,
                    start=done.start - begin,
                    end=done.end - begin,
                    cause=done.cause,
                    reward=done.reward,
                    turns=done.turns,
                    tokens=done.tokens,
                    shown=number in shown and is_near,
                )
            )
    return rows


def tail(ends: Sequence[float], batch: int = 0) -> Tail:
    """Return when 90 % and when all of a batch had ended; `ends` are from its first start."""
    ordered = sorted(ends)
    return Tail(
        batch=batch,
        n=len(ordered),
        t90=ordered[ceil(DONE * len(ordered) - 1e-9) - 1],
        t100=ordered[-1],
    )


def tails(rows: Sequence[Row]) -> list[Tail]:
    """Return the tail of every batch."""
    ends: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        ends[row.batch].append(row.end)
    return [tail(some, batch) for batch, some in sorted(ends.items())]


def tail_share(rows: Sequence[Row]) -> float:
    """Return the share of rollout time after 90 % of a batch's trajectories had ended."""
    found = tails(rows)
    whole = sum(each.t100 for each in found)
    return sum(each.t100 - each.t90 for each in found) / whole if whole else 0.0


def limit_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of trajectories that ended at each limit."""
    causes = Counter(row.cause for row in rows)
    return {cause: causes[cause] / len(rows) for cause in LIMITS if causes[cause]}


def solved_turns(rows: Sequence[Row]) -> float | None:
    """Return the median turns of solved trajectories."""
    turns = [row.turns for row in rows if row.is_solved]
    return median(turns) if turns else None


def counted(turns: float) -> str:
    return f"{turns:g} turn{'s' * (turns != 1)}"


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    shown = [row for row in rows if row.shown]
    chosen = list(dict.fromkeys(row.batch for row in shown))
    figure, all_axes = plot.two_over_one(narrow=narrow)
    found = {each.batch: each for each in tails(rows)}
    for axes, batch in zip(all_axes, chosen, strict=False):
        _gantt(axes, [row for row in shown if row.batch == batch], found[batch])
    if len(chosen) == 1:
        plot.say_nothing(all_axes[1], "the run had one batch")
    _curve(all_axes[-1], rows)
    handles = [Patch(facecolor=c, hatch=h, edgecolor=plot.INK, label=t) for t, c, h in _LOOKS]
    figure.legend(handles=handles, loc="outside lower left", ncols=2 if narrow else 4)
    n = f"{len(rows):,} trajectories in {len(found):,} batches"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    return (
        f"{whole_percent(tail_share(rows))} of rollout time came after 90 % of a batch's "
        "trajectories had ended"
    )


def finding(rows: Sequence[Row]) -> str:
    found = tails(rows)
    limits = [f"{whole_percent(x)} ended {LIMITS[c]}" for c, x in limit_shares(rows).items()]
    turns = solved_turns(rows)
    told = [f"solved ones took a median of {counted(turns)}"] if turns is not None else []
    longest = max(row.end - row.start for row in rows)
    more = "; ".join([*limits, *told, f"the longest trajectory took {plot.spoken(longest)}"])
    return (
        f"{headline(rows)} (n = {len(rows):,} trajectories in {len(found):,} batches of about "
        f"{round(len(rows) / len(found)):,}). {more[0].upper()}{more[1:]}."
    )


def _ends(part: Sequence[events.TrajectoryEvent]) -> list[float]:
    begin = min(done.start for done in part)
    return [done.end - begin for done in part]


def _unbroken(
    batch: Sequence[events.TrajectoryEvent],
) -> list[list[events.TrajectoryEvent]]:
    """Cut a batch where nothing of it was under way: it went on after a resume."""
    parts: list[list[events.TrajectoryEvent]] = []
    latest = 0.0
    for done in sorted(batch, key=lambda done: done.start):
        if not parts or done.start > latest:
            parts.append([])
        parts[-1].append(done)
        latest = max(latest, done.end)
    return parts


def _chosen(found: Sequence[Tail]) -> set[int]:
    """Pick the batch of median length and the longest."""
    ordered = sorted(found, key=lambda each: each.t100)
    return {each.batch for each in (ordered[len(ordered) // 2], ordered[-1])} if ordered else set()


def _gantt(axes: Axes, rows: Sequence[Row], of: Tail) -> None:
    for place, row in enumerate(sorted(rows, key=lambda row: row.end)):
        colour, hatch = _look(row)
        axes.barh(
            place, row.end - row.start, left=row.start, height=0.75, color=colour, hatch=hatch,
            edgecolor=plot.INK, linewidth=0.4,
        )  # fmt: skip
    axes.axvline(of.t90, color=plot.INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"90 % of {of.n} done",
        (of.t90, len(rows) + 0.1),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8,
    )
    axes.set_ylim(-0.7, len(rows) + 0.6)
    draws = sorted({row.draw for row in rows})
    what = f"draw {draws[0]}" if len(draws) == 1 else f"draws {draws[0]} to {draws[-1]}"
    axes.set_title(f"{what}: tail was {whole_percent(of.share)} of the batch's time")
    axes.set_xlim(0, of.t100 * 1.02 or 1)
    axes.set_yticks([])
    axes.set_xlabel("seconds since the batch's first start")
    axes.set_ylabel(f"{len(rows)} attempts, by end")
    axes.grid(visible=False, axis="y")


_LOOKS = (
    ("solved", plot.GREEN, ""),
    ("not solved", plot.GREY, ""),
    ("ended at a limit", plot.ORANGE, "////"),
    ("lost", plot.PAPER, "xxxx"),
)


def _look(row: Row) -> tuple[str, str]:
    if row.reward is None:
        return _LOOKS[3][1:]
    if row.is_solved:
        return _LOOKS[0][1:]
    return _LOOKS[2][1:] if row.cause in LIMITS else _LOOKS[1][1:]


def _curve(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw, batch by batch, what share of its time was tail."""
    found = tails(rows)
    axes.plot(
        [each.batch for each in found],
        [100 * each.share for each in found],
        ".",
        color=plot.NAVY,
        markersize=5,
    )
    axes.axhline(100 * tail_share(rows), color=plot.MAIN, linewidth=1.4)
    axes.set_title(f"Tail share, batch by batch (n = {len(found):,})")
    axes.set_xlabel("batch")
    axes.set_ylabel("% of the batch's time")
    axes.set_ylim(0, 100)


FIGURE = Figure(
    name="long_tail",
    title="The long tail",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
