"""Figure: how many tasks the model solves, before and after, and whether that is learning.

Bars are the evaluation's own estimates and 95 % intervals. A paired difference is the mean over
the tasks that both evaluations hold of (share of attempts solved by RL − by SFT), its interval
from `agentrl.estimators`: a bootstrap over clusters of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from agentrl.estimators import paired_difference
from analysis import plot
from analysis.evaluations import SPLITS, Evaluation, model_label
from analysis.figure import Figure
from analysis.run_files import Run

MODELS = ("base", "sft", "rl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number with its interval, as shares of tasks."""

    kind: str
    """`pass`: a model's pass@k. `difference`: RL − SFT in pass@1, paired by task."""
    split: str
    model: str
    temperature: float
    k: int
    value: float
    low: float
    high: float
    tasks: int
    attempts: int

    @property
    def series(self) -> tuple[float, int, str]:
        """Sort key of its bar within a split: warm before cool, and models in training order."""
        order = MODELS.index(self.model) if self.model in MODELS else len(MODELS)
        return (-self.temperature, order, self.model)


def table(run: Run) -> list[Row]:
    rows = [
        Row(
            kind="pass",
            split=each.split,
            model=each.model,
            temperature=each.temperature,
            k=k,
            value=estimate.value,
            low=estimate.low,
            high=estimate.high,
            tasks=each.tasks,
            attempts=each.attempts,
        )
        for each in run.evaluations
        for k, estimate in sorted(each.pass_at.items())
    ]
    rows.sort(key=lambda row: (_split_order(row.split), row.k, row.series))
    return rows + _differences(run.evaluations)


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (first, many, apart) = plot.two_over_one(narrow=narrow)
    best = max((row.k for row in rows if row.kind == "pass"), default=1)
    _bars(first, [row for row in rows if row.kind == "pass" and row.k == 1], 1)
    _bars(many, [row for row in rows if row.kind == "pass" and row.k == best], best)
    _forest(apart, [row for row in rows if row.kind == "difference"])
    _legend(figure, rows, columns=2 if narrow else 4)
    tasks = [row.tasks for row in rows if row.kind == "pass" and row.split == main_split(rows)]
    n = f"{max(tasks, default=0)} tasks × {max(row.attempts for row in rows)} attempts"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    """Say each model's pass@1, in the order of training."""
    split = main_split(rows)
    warm = max((row.temperature for row in rows if row.split == split), default=1.0)
    found = [row for model in MODELS if (row := pick(rows, "pass", model, split, warm))]
    told = ", ".join(f"{model_label(row.model)} {100 * row.value:.1f} %" for row in found)
    return f"pass@1 on {_spoken(split)}: {told}" if told else f"pass@1 on {_spoken(split)}"


def main_split(rows: Sequence[Row]) -> str:
    """Return the split that the report leads with: held-out tasks, if there are any."""
    return next((row.split for row in rows if row.kind == "pass"), SPLITS[0])


def verdict(rows: Sequence[Row]) -> str:
    """Say what pass@1 was before and after, and whether the intervals overlap."""
    split = main_split(rows)
    before = pick(rows, "pass", "sft", split, 1.0)
    after = pick(rows, "pass", "rl", split, 1.0)
    if before is None or after is None:
        known = before or after
        only = f"; {model_label(known.model)} alone has pass@1 {percent(known)}" if known else ""
        return f"SFT and RL were not both evaluated on {_spoken(split)} at T=1{only}."
    apart = after.low > before.high or before.low > after.high
    return (
        f"On {_spoken(split)} at T=1, pass@1 went from {percent(before)} after SFT to "
        f"{percent(after)} after RL; the 95 % intervals {'do not overlap' if apart else 'overlap'}."
    )


def control(rows: Sequence[Row]) -> str:
    """Say what RL − SFT is at a temperature under 1; a merely sharper policy gains nothing."""
    gains = [row for row in rows if row.kind == "difference" and row.split == main_split(rows)]
    cool = [row for row in gains if row.temperature < 1]
    if not cool:
        return (
            "SFT and RL were not both evaluated at a lower temperature, so sharpening is not told "
            "apart from learning."
        )
    row = cool[0]
    meaning = (
        "above zero, so the gain is more than sharpening"
        if row.low > 0
        else "not clearly above zero, so the gain may be sharpening"
    )
    return (
        f"T={row.temperature:g} is the control for sharpening: there, RL − SFT paired by task is "
        f"{points(row)}, {meaning}."
    )


def finding(rows: Sequence[Row]) -> str:
    """Say what the second numbers are: pass@k, and the splits farther from the training."""
    best = max((row.k for row in rows if row.kind == "pass"), default=1)
    asked = [(SPLITS[0], best), *((split, 1) for split in SPLITS[1:])]
    told = [words for split, k in asked if (words := _second(rows, split, k))]
    if not told:
        return verdict(rows)
    return f"SFT → RL at T=1: {'; '.join(told)}. Lines are 95 % intervals."


def percent(row: Row) -> str:
    """Return a row as `28.2 % [23.5, 33.4]`."""
    return f"{100 * row.value:.1f} % [{100 * row.low:.1f}, {100 * row.high:.1f}]"


def points(row: Row) -> str:
    """Return a difference as `+9.9 points [+5.9, +14.0]`."""
    return f"{100 * row.value:+.1f} points [{100 * row.low:+.1f}, {100 * row.high:+.1f}]"


def pick(rows: Sequence[Row], kind: str, model: str, split: str, temperature: float) -> Row | None:
    """Return the pass@1 or difference row with these properties."""
    for row in rows:
        found = (row.kind, row.model, row.split, row.temperature, row.k)
        if found == (kind, model, split, temperature, 1):
            return row
    return None


def _second(rows: Sequence[Row], split: str, k: int) -> str:
    shares = {
        row.model: row.value
        for row in rows
        if (row.kind, row.split, row.k, row.temperature) == ("pass", split, k, 1.0)
    }
    if not {"sft", "rl"} <= shares.keys():
        return ""
    return (
        f"{split.replace('_', ' ')} pass@{k} {100 * shares['sft']:.1f} → {100 * shares['rl']:.1f} %"
    )


def _differences(found: Sequence[Evaluation]) -> list[Row]:
    by_key = {(each.model, each.split, each.temperature): each for each in found}
    rows = []
    for (model, split, temperature), after in by_key.items():
        before = by_key.get(("sft", split, temperature))
        if model != "rl" or before is None or not before.per_task.keys() & after.per_task.keys():
            continue
        gain = paired_difference(as_summary(before), as_summary(after))
        rows.append(
            Row(
                kind="difference",
                split=split,
                model=model,
                temperature=temperature,
                k=1,
                value=gain.value,
                low=gain.low,
                high=gain.high,
                tasks=gain.tasks,
                attempts=after.attempts,
            )
        )
    return sorted(rows, key=lambda row: (_split_order(row.split), -row.temperature))


def as_summary(found: Evaluation) -> dict[str, object]:
    return {"per_task": found.per_task, "clusters": found.clusters}


def _split_order(split: str) -> tuple[int, str]:
    return (SPLITS.index(split) if split in SPLITS else len(SPLITS), split)


def _spoken(split: str) -> str:
    return {"held_out": "held-out tasks"}.get(split, plot.plain(split).replace("_", " "))


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"T={value:g}"


def _look(row: Row) -> dict[str, Any]:
    """Return the look of a series' bars: colour by model, hatched where sampling is cooler."""
    warm = row.temperature >= 1
    return {
        "facecolor": plot.MODEL_COLOURS.get(row.model, plot.PURPLE),
        "alpha": 1.0 if warm else 0.55,
        "hatch": "" if warm else "////",
        "edgecolor": plot.PAPER,
        "linewidth": 0,
    }


def _bars(axes: Axes, rows: Sequence[Row], k: int) -> None:
    axes.set_title(f"pass@{k}, 95 % interval")
    axes.set_ylabel("tasks solved, %")
    splits = list(dict.fromkeys(row.split for row in rows))
    series = {split: [row.series for row in rows if row.split == split] for split in splits}
    width = 0.84 / max((len(found) for found in series.values()), default=1)
    for row in rows:
        found = series[row.split]
        shift = found.index(row.series) - (len(found) - 1) / 2
        place = splits.index(row.split) + shift * width
        value, low, high = (100 * x for x in (row.value, row.low, row.high))
        axes.bar(place, value, width * 0.92, **_look(row))
        axes.plot([place, place], [low, high], color=plot.INK, linewidth=1.1)
        axes.annotate(
            f"{value:.1f}" if len(rows) <= 4 else f"{value:.0f}",
            (place, high),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    names = [plot.plain(split, 24).replace("_", "\n", 1) for split in splits]
    counts = [next(row.tasks for row in rows if row.split == split) for split in splits]
    labels = [f"{name}\n({count} tasks)" for name, count in zip(names, counts, strict=True)]
    axes.set_xticks(range(len(splits)), labels)
    axes.set_ylim(0, max([100 * row.high for row in rows], default=1) * 1.14)
    axes.grid(visible=False, axis="x")


def _forest(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("RL − SFT in pass@1, paired by task")
    if not rows:
        plot.say_nothing(axes, "needs SFT and RL at one temperature")
        return
    for place, row in enumerate(rows):
        axes.plot([100 * row.low, 100 * row.high], [place, place], color=plot.INK, linewidth=1.4)
        axes.plot(
            100 * row.value,
            place,
            "o",
            color=plot.MODEL_COLOURS["rl"],
            markersize=7,
            alpha=1.0 if row.temperature >= 1 else 0.6,
        )
        axes.annotate(
            f"{100 * row.value:+.1f}",
            (100 * row.value, place),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
        )
    names = [f"{_spoken(row.split)}, {_temperature(row.temperature)}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.axvline(0, color=plot.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("percentage points, 95 % interval")
    axes.grid(visible=False, axis="y")


def _legend(figure: Canvas, rows: Sequence[Row], *, columns: int) -> None:
    shown = {row.series: row for row in rows if row.kind == "pass"}
    handles = [
        Patch(
            label=f"{plot.plain(model_label(row.model), 24)}, {_temperature(row.temperature)}",
            **_look(row),
        )
        for _, row in sorted(shown.items(), key=lambda item: item[0])
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)


FIGURE = Figure(
    name="solve_rate",
    title="Solve rate",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No evaluation was found, so pass@1 is unknown.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
