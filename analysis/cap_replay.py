"""Figure: what a lower cap on turns or tokens would have cost and saved, replayed from the record.

A cap of X turns ends a trajectory with the last span of its X-th turn (a cap of Y tokens: with the
first model call whose prompt and reply pass Y, its command included), and its grading follows
at once. What is saved is each batch's time, Σ over batches of its last end less its last end under
the cap, as a share of Σ of their times. What is lost is every solved trajectory that the cap
cuts: an upper bound, as some might have handed in sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from agentrl import events
from analysis import plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.spans import Floats, Ints, Owners, owners_of
from analysis.steps import groups_per_step
from analysis.table import whole_percent

CUTS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Caps that are tried, as shares of the largest number seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cap."""

    what: str
    """`turns` or `tokens`."""
    cap: int
    trajectories: int
    cut: int
    solved: int
    solved_cut: int
    batch_s: float
    saved_s: float
    """Of `batch_s`, the sum of all batches' times."""

    @property
    def saved(self) -> float:
        return self.saved_s / self.batch_s if self.batch_s else 0.0

    @property
    def lost(self) -> float:
        return self.solved_cut / self.solved if self.solved else 0.0


@remembered
def table(run: Run) -> list[Row]:
    owners = owners_of(run)
    calls = owners.spans(events.ModelCall)
    if not owners.count or not len(calls.owner):
        return []
    replay = _Replay(run, owners)
    rows: list[Row] = []
    turn = calls.numbers("turn") + 1
    context = calls.numbers("prompt_tokens") + calls.numbers("new_tokens")
    for what, amount in (("turns", turn), ("tokens", context)):
        for cap in _caps(amount[calls.owner >= 0]):
            passed = amount >= cap if what == "turns" else amount > cap
            rows.append(replay.row(what, cap, passed))
    return rows


class _Replay:
    """Ends trajectories earlier and looks at what becomes of their batches."""

    def __init__(self, run: Run, owners: Owners) -> None:
        done = run.of(events.TrajectoryEvent)
        self._owners = owners
        self._calls = owners.spans(events.ModelCall)
        self._turns_end = _turns_end(owners)
        grades = owners.spans(events.Grade)
        self._grade = owners.sums(grades, grades.seconds)
        self._turns = np.array([each.turns for each in done], np.float64)
        self._solved = np.array([bool(each.reward and each.reward > 0) for each in done])
        size = groups_per_step(run)
        batches = np.array([each.draw // size for each in done], np.int64)
        _, self._batch = np.unique(batches, return_inverse=True)
        many = int(self._batch.max()) + 1
        self._begin = np.full(many, np.inf)
        np.minimum.at(self._begin, self._batch, owners.start)

    def row(self, what: str, cap: int, passed: NDArrayBool) -> Row:
        """Replay with trajectories ended at their first call in `passed`."""
        ends = np.full(self._owners.count, np.inf)
        hits = passed & (self._calls.owner >= 0)
        np.minimum.at(ends, self._calls.owner[hits], self._turns_end[hits])
        ends += self._grade
        is_cut = ends < self._owners.end - 1e-6
        if what == "turns":
            is_cut &= self._turns > cap
        ends = np.where(is_cut, ends, self._owners.end)
        whole, left = self._batches(self._owners.end), self._batches(ends)
        return Row(
            what=what,
            cap=cap,
            trajectories=self._owners.count,
            cut=int(is_cut.sum()),
            solved=int(self._solved.sum()),
            solved_cut=int((is_cut & self._solved).sum()),
            batch_s=whole,
            saved_s=whole - left,
        )

    def _batches(self, ends: Floats) -> float:
        last = np.full(len(self._begin), -np.inf)
        np.maximum.at(last, self._batch, ends)
        return float((last - self._begin).sum())


NDArrayBool = np.ndarray[tuple[int], np.dtype[np.bool_]]


def _turns_end(owners: Owners) -> Floats:
    """Return for each model call when its turn ended: with its command, if it had one."""
    calls, tools = owners.spans(events.ModelCall), owners.spans(events.ToolCall)
    ends = calls.end.copy()
    if not len(tools.owner):
        return ends
    keys, tool_keys = (_turn_key(x.owner, x.numbers("turn")) for x in (calls, tools))
    order = np.lexsort((tools.end, tool_keys))
    place = np.searchsorted(tool_keys[order], keys, side="right") - 1
    found = order[np.maximum(place, 0)]
    has_one = (place >= 0) & (tool_keys[found] == keys) & (calls.owner >= 0)
    return np.where(has_one, np.maximum(ends, tools.end[found]), ends)


def _turn_key(owner: Ints, turn: Floats) -> Ints:
    return owner * 1_000_000 + turn.astype(np.int64)


def _caps(amount: Floats) -> Iterator[int]:
    most = float(amount.max(initial=0.0))
    yield from sorted({round(share * most) for share in CUTS} - {0, round(most)})


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    kinds = list(dict.fromkeys(row.what for row in rows))
    figure, all_axes = plot.grid(len(kinds), narrow=narrow, height_in=2.6)
    for axes, what in zip(all_axes, kinds, strict=True):
        _panel(axes, [row for row in rows if row.what == what], what)
    handles, _ = all_axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    n = f"{rows[0].trajectories:,} trajectories, {rows[0].solved:,} of them solved"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def best(rows: Sequence[Row]) -> Row | None:
    """Return the cap that saves most while it loses no more than 5 % of what was solved.

    Where nothing was solved, what a cap loses is not known, and none is best.
    """
    cheap = [row for row in rows if row.solved and row.lost <= 0.05 and row.saved >= 0.02]
    return max(cheap, key=lambda row: row.saved, default=None)


def headline(rows: Sequence[Row]) -> str:
    found = best(rows)
    if not rows[0].solved:
        return "No trajectory was solved, so what a lower cap loses is not known"
    if found is None:
        return "No lower cap saves 2 % of batch time without losing over 5 % of the solved"
    return (
        f"A cap of {found.cap:,} {found.what} would have saved {whole_percent(found.saved)} of "
        f"batch time and lost {found.solved_cut:,} of {found.solved:,} solved"
    )


def finding(rows: Sequence[Row]) -> str:
    return (
        f"{headline(rows)} (n = {rows[0].trajectories:,} trajectories; replayed from the record, "
        "losses are an upper bound)."
    )


def _panel(axes: Axes, rows: Sequence[Row], what: str) -> None:
    caps = [row.cap for row in rows]
    saved, lost = [100 * row.saved for row in rows], [100 * row.lost for row in rows]
    axes.plot(caps, saved, "o-", color=plot.NAVY, label="batch time saved")
    axes.plot(caps, lost, "s--", color=plot.ORANGE, label="solved ones lost, at most")
    axes.set_title(f"A cap on {what}")
    axes.set_xlabel(f"cap, {what}")
    axes.set_ylabel("%")
    axes.set_ylim(0, 105)
    axes.set_xticks(caps, [f"{cap:,}" for cap in caps])


FIGURE = Figure(
    name="cap_replay",
    title="What a lower cap would have done",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No model call of an ended trajectory was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
