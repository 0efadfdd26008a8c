"""Figure: what every node did in a few minutes, and the same as JSON for Perfetto.

`report` takes ten minutes around the longest step; alone, `--since` and `--until` choose. The JSON
(report/trace.json) holds the whole window. The drawing is of its middle: of each node the first
lanes, and as long a time as leaves the bars apart. Its shares are of the drawn lanes' time that
trajectories fill.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from agentrl import events
from analysis import lanes, perfetto, plot
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run, load_run
from analysis.table import whole_percent
from analysis.window import Window

WINDOW_S = 600.0
MOST_NODES, MOST_LANES, MOST_SPANS = 4, 12, 1200
"""In the drawing."""
SHORTEST_S = 5.0
LOOKS = {
    "sandbox start": (plot.GOLD, "////"),
    "set-up": (plot.PAPER, "...."),
    "model call": (plot.SKY, ""),
    "command": (plot.GREEN, ""),
    "grading": (plot.PINK, "xxxx"),
}
"""Colour and hatch, so that a grey print tells them apart."""
NAMES = {
    "sandbox start": "sandbox start",
    "set-up": "set-up",
    "model call": "model calls",
    "command": "commands",
    "grading": "grading",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One bar of the drawing."""

    node: str
    lane: int
    phase: str
    trajectory: str
    """Or the number of a step."""
    start: float
    """Since the drawing's left edge, seconds."""
    end: float


def chosen(run: Run) -> tuple[float, float]:
    """Return the window that a report exports: some minutes around the longest step."""
    first, last = run.store.span()
    if last - first <= WINDOW_S:
        return first, last
    steps = run.of(events.Step)
    middle = max(steps, key=lambda step: step.seconds).start if steps else (first + last) / 2
    since = max(first, min(middle - WINDOW_S / 2, last - WINDOW_S))
    return since, since + WINDOW_S


@remembered
def window(run: Run) -> list[lanes.Span]:
    """Return the spans of the window that is chosen for a run."""
    return lanes.spans(run, chosen(run))


@remembered
def table(run: Run) -> list[Row]:
    return bars(window(run), chosen(run))


def bars(found: Sequence[lanes.Span], within: tuple[float, float]) -> list[Row]:
    """Return the bars of the drawing: few enough lanes, and a time that leaves them apart."""
    every = [span for span in found if span.phase in LOOKS or span.phase == "step"]
    is_shown = _shown_nodes(every)
    some = [span for span in every if span.node in is_shown and span.lane < MOST_LANES]
    low, high = _filled(some, within)
    while high - low > SHORTEST_S and len(some) > MOST_SPANS:
        low, high = low + (high - low) / 4, high - (high - low) / 4
        some = [span for span in some if span.end > low and span.start < high]
    return [
        Row(
            node=span.node,
            lane=span.lane,
            phase=span.phase,
            trajectory=str(span.facts.get("trajectory", span.name.removeprefix("step "))),
            start=max(span.start, low) - low,
            end=min(span.end, high) - low,
        )
        for span in some
    ]


def _filled(some: Sequence[lanes.Span], within: tuple[float, float]) -> tuple[float, float]:
    """Return the window without what is empty at its ends."""
    low, high = within
    begin, end = (
        min((x.start for x in some), default=low),
        max((x.end for x in some), default=high),
    )
    return max(low, begin), min(high, end)


def _shown_nodes(every: Sequence[lanes.Span]) -> set[str]:
    nodes = sorted({span.node for span in every} - {lanes.TRAINER, lanes.UNFINISHED})
    return {*nodes[:MOST_NODES], lanes.TRAINER}


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return each phase's share of the time from first to last bar of each trajectory."""
    whole: dict[tuple[str, str], tuple[float, float]] = {}
    spent: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.phase in LOOKS:
            spent[row.phase] += row.end - row.start
            key = (row.node, row.trajectory)
            low, high = whole.get(key, (row.start, row.end))
            whole[key] = min(low, row.start), max(high, row.end)
    total = sum(high - low for low, high in whole.values())
    return {phase: spent[phase] / total for phase in LOOKS if spent[phase] and total}


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    places = _places(rows)
    figure, (axes,) = plot.column([0.9 + 0.115 * (max(places.values()) + 2)], narrow=narrow)
    for phase, look in LOOKS.items():
        some = [row for row in rows if row.phase == phase]
        _boxes(axes, some, [places[row.node, row.lane] for row in some], look)
    steps = [row for row in rows if row.phase == "step"]
    for number, step in enumerate(steps):
        place = [places[step.node, step.lane]]
        _boxes(axes, [step], place, ((plot.GREY, plot.MUTED)[number % 2], ""))
    _name_nodes(axes, places)
    axes.set_xlim(0, max(row.end for row in rows))
    axes.set_ylim(max(places.values()) + 1, -1)
    axes.set_xlabel("seconds in the window; the trainer's bars are steps")
    axes.grid(visible=False, axis="y")
    seen = {row.phase for row in rows}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=plot.INK, linewidth=0.2, label=phase)
        for phase, (colour, hatch) in LOOKS.items()
        if phase in seen
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3 if narrow else 5)
    n = f"{len(rows):,} spans in {len(places)} lanes"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    found = shares(rows)
    seconds = max(row.end for row in rows)
    if not found:
        return f"In these {plot.spoken(seconds)} no trajectory was under way"
    most = max(found, key=lambda phase: found[phase])
    share = whole_percent(found[most])
    return f"In these {plot.spoken(seconds)}, {share} of the trajectories' time was {NAMES[most]}"


def finding(rows: Sequence[Row]) -> str:
    steps = [row.trajectory for row in rows if row.phase == "step"]
    many = f" Steps {steps[0]} to {steps[-1]} are shown." if steps else ""
    told = f" Step {steps[0]} is shown." if len(steps) == 1 else many
    return (
        f"{headline(rows)} (n = {len(rows):,} spans; of each node {MOST_LANES} lanes at most)."
        f"{told} White is waiting that no span covers. trace.json holds all of the window."
    )


def _places(rows: Sequence[Row]) -> dict[tuple[str, int], int]:
    """Return the height of each lane: the trainer on top, a gap between nodes."""
    keys = sorted({(row.node != lanes.TRAINER, row.node, row.lane) for row in rows})
    places: dict[tuple[str, int], int] = {}
    at = 0
    for old, (_, node, lane) in zip([None, *keys], keys, strict=False):
        at += 1 + (old is not None and old[1] != node)
        places[node, lane] = at - 1
    return places


def _boxes(axes: Axes, rows: Sequence[Row], places: Sequence[int], look: tuple[str, str]) -> None:
    """Draw all bars of one colour as one outline: a page with a thousand elements is slow."""
    if not rows:
        return
    corners = np.zeros((len(rows), 5, 2))
    corners[:, :, 0] = [(r.start, r.end, r.end, r.start, r.start) for r in rows]
    corners[:, :, 1] = [(y - 0.45, y - 0.45, y + 0.45, y + 0.45, y - 0.45) for y in places]
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(rows)
    outline = Outline(corners.reshape(-1, 2), codes)
    colour, hatch = look
    axes.add_patch(
        PathPatch(outline, facecolor=colour, hatch=hatch, edgecolor=plot.INK, linewidth=0.2)
    )


def _name_nodes(axes: Axes, places: dict[tuple[str, int], int]) -> None:
    nodes = dict.fromkeys(node for node, _ in places)
    middles = []
    for node in nodes:
        mine = [place for (name, _), place in places.items() if name == node]
        middles.append((min(mine) + max(mine)) / 2)
    axes.set_yticks(middles, plot.fitting(axes, list(nodes)))


FIGURE = Figure(
    name="trace",
    title="A few minutes of every node",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No span of a trajectory or of a step was recorded.",
)


def main(argv: Sequence[str]) -> int:
    """Write report/trace.json and the figure of each run."""
    arguments = argparse.ArgumentParser(prog="python -m analysis.trace", description=__doc__)
    arguments.add_argument("runs", metavar="RUN", nargs="+")
    arguments.add_argument("--since", default="", help="2026-11-30T01:00, or 90m after the begin")
    arguments.add_argument("--until", default="")
    given = arguments.parse_args(argv)
    for name in given.runs:
        run = load_run(Path(name))
        first, last = run.store.span()
        bounds = chosen(run)
        if given.since or given.until:
            low, high = Window(since=given.since, until=given.until).bounds(first)
            bounds = max(first, low), min(last, high)
        found = lanes.spans(run, bounds)
        said = perfetto.write_trace(found, run.report / "trace.json")
        print(f"{run.report / 'trace.json'}: {said}")
        written = FIGURE.write_rows(bars(found, bounds), run.report)
        print(f"{run.report / 'trace'}.png .svg .csv: {written.finding}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
