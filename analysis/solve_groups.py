"""Figure: pass@1 by repository and by difficulty, where an evaluation's tasks have more than one.

The rate of a group is the mean over its tasks of the share of attempts that solved them; its
interval is that mean's bootstrap over tasks (`agentrl.estimators.cluster_mean`, seed 0). A task's
repository and difficulty are what the evaluation's summary says; without it the repository is what
the task's id says before `__` (SWE-bench's way) or `/`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from agentrl.estimators import cluster_mean
from analysis import plot
from analysis.evaluations import SPLITS, Evaluation, model_label
from analysis.figure import Figure
from analysis.run_files import Run

SAMPLES = 2000
MOST_GROUPS = 14
"""Groups in the drawing, those with most tasks; the table has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    by: str
    """`repository` or `difficulty`."""
    group: str
    model: str
    split: str
    temperature: float
    tasks: int
    value: float
    low: float
    high: float


def table(run: Run) -> list[Row]:
    rows: list[Row] = []
    for each in run.evaluations:
        told = {task: _repository(task) for task in each.per_task} | each.repository
        rows += _rows(each, "repository", told)
        rows += _rows(each, "difficulty", each.difficulty)
    return rows


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    some = _main(rows)
    kinds = list(dict.fromkeys(row.by for row in some))
    most = max(len(_groups(some, by)) for by in kinds)
    figure, all_axes = plot.grid(
        len(kinds), narrow=narrow, height_in=1.3 + 0.13 * most * len(_models(some))
    )
    for axes, by in zip(all_axes, kinds, strict=True):
        _panel(axes, [row for row in some if row.by == by], by)
    handles = [
        Patch(color=_colour(model), label=plot.plain(model_label(model), 24))
        for model in _models(some)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    plot.save(figure, path, headline(rows), n=f"{_tasks(some)} tasks", png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    some = _main(rows)
    last = _models(some)[-1]
    mine = [row for row in some if row.model == last and row.by == some[0].by]
    best, worst = max(mine, key=lambda row: row.value), min(mine, key=lambda row: row.value)
    return (
        f"{model_label(last)} solves {100 * best.value:.0f} % of {best.group} and "
        f"{100 * worst.value:.0f} % of {worst.group}"
    )


def finding(rows: Sequence[Row]) -> str:
    tasks = _tasks(_main(rows))
    return f"{headline(rows)} (n = {tasks} tasks; lines are 95 % intervals, wide for few tasks)."


def _tasks(some: Sequence[Row]) -> int:
    return sum(row.tasks for row in some if (row.by, row.model) == (some[0].by, some[0].model))


def _rows(found: Evaluation, by: str, groups: Mapping[str, str]) -> Iterator[Row]:
    members: dict[str, list[float]] = defaultdict(list)
    for task, share in found.per_task.items():
        if group := groups.get(task):
            members[group].append(share)
    if len(members) < 2:
        return
    for group, shares in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        names = [str(i) for i in range(len(shares))]
        mean = cluster_mean(np.array(shares), names, samples=SAMPLES)
        yield Row(
            by=by,
            group=group,
            model=found.model,
            split=found.split,
            temperature=found.temperature,
            tasks=len(shares),
            value=mean.value,
            low=mean.low,
            high=mean.high,
        )


def _repository(task: str) -> str:
    for mark in ("__", "/"):
        if mark in task:
            return task.partition(mark)[0]
    return ""


def _main(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the split and temperature that the report leads with."""
    split = min({row.split for row in rows}, key=lambda s: (s != SPLITS[0], s))
    warm = max(row.temperature for row in rows if row.split == split)
    return [row for row in rows if (row.split, row.temperature) == (split, warm)]


def _models(rows: Sequence[Row]) -> list[str]:
    order = ("base", "sft", "rl")
    names = dict.fromkeys(row.model for row in rows)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _groups(rows: Sequence[Row], by: str) -> list[str]:
    return list(dict.fromkeys(row.group for row in rows if row.by == by))[:MOST_GROUPS]


def _colour(model: str) -> str:
    return plot.MODEL_COLOURS.get(model, plot.PURPLE)


def _panel(axes: Axes, rows: Sequence[Row], by: str) -> None:
    groups, models = _groups(rows, by), _models(rows)
    height = 0.8 / len(models)
    counts = {row.group: row.tasks for row in rows}
    for row in rows:
        if row.group in groups:
            place = groups.index(row.group) + (models.index(row.model) + 0.5) * height - 0.4
            axes.barh(
                place, 100 * row.value, height * 0.92, color=_colour(row.model),
                edgecolor=plot.INK, linewidth=0.4,
            )  # fmt: skip
            ends = [100 * row.low, 100 * row.high]
            axes.plot(ends, [place, place], color=plot.INK, linewidth=1)
    axes.set_yticks(
        range(len(groups)), [f"{plot.plain(name, 24)} (n = {counts[name]})" for name in groups]
    )
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("pass@1, %")
    axes.set_title(f"By {by}")
    axes.grid(visible=False, axis="y")


FIGURE = Figure(
    name="solve_groups",
    title="Solve rate by repository and difficulty",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No evaluation has tasks of more than one repository or difficulty.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
