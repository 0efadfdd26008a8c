"""How every figure looks: colours, sizes, and the files it is written to. No display needed."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.handoff.publish import publish_bytes
from analysis.table import whole_percent

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

INK, MUTED, GRID, PAPER = "#1d2530", "#66717f", "#dfe3e8", "#fefefe"
"""Page colours by role; `page` replaces them, so that a figure follows light and dark."""
MODEL_COLOURS = {"base": "#9aa3ad", "sft": "#4f8fc0", "rl": "#e0782f"}
BLUE, ORANGE, GREEN, PINK, PURPLE, GREY, GOLD = (
    "#4f8fc0",
    "#e0782f",
    "#3d9a76",
    "#c9638f",
    "#8a78c9",
    "#9aa3ad",
    "#c9a227",
)
STYLE: dict[RcKeyType, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": PAPER,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",
}
styled = matplotlib.rc_context(STYLE)
"""Decorates every `draw`: what it makes has this style, and nothing outside it changes."""
WIDE_IN, NARROW_IN = 8.6, 4.4
"""Widths for a desktop and for a phone, inches."""


def grid(
    panels: int, *, narrow: bool, columns: int = 2, height_in: float = 2.15
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `panels` axes; narrow ones stand in one column."""
    columns = 1 if narrow else min(columns, panels)
    rows = -(-panels // columns)
    size = (NARROW_IN if narrow else WIDE_IN, height_in * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def save(figure: Figure, path: Path, *, png: bool = True) -> None:
    """Write `figure` as `path` with .svg and, unless switched off, .png in place of its ending."""
    figure.draw_without_rendering()  # lays out once; each savefig would do it anew
    figure.set_layout_engine("none")
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        for kind in ("svg", "png") if png else ("svg",):
            data = BytesIO()
            metadata = {"Date": None} if kind == "svg" else {}
            figure.savefig(data, format=kind, dpi=150, metadata=metadata)
            publish_bytes(path.with_suffix(f".{kind}"), data.getvalue())


def say_nothing(axes: Axes, words: str) -> None:
    """Show in an empty panel why it is empty."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window` − 1 before it."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / (i + 1 - max(0, i + 1 - window))
        for i in range(len(values))
    ]


def labelled_bars(
    axes: Axes, names: Sequence[str], seconds: Sequence[float], colours: Sequence[str]
) -> None:
    """Draw a horizontal bar a part of a time, each with its seconds and its share of the whole."""
    total = sum(seconds)
    axes.barh(range(len(names)), seconds, color=colours, height=0.7)
    for place, width in enumerate(seconds):
        axes.annotate(
            f"{width:.2f} s · {whole_percent(width / total if total else 0.0)}",
            (width, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.4 or 1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")


def two_over_one(*, narrow: bool) -> tuple[Figure, tuple[Axes, Axes, Axes]]:
    """Return a figure of two panels above one that is as wide as both; narrow: a column."""
    size = (NARROW_IN, 7.6) if narrow else (WIDE_IN, 5.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.add_gridspec(3 if narrow else 2, 1 if narrow else 2)
    if narrow:
        places = (cells[0, 0], cells[1, 0], cells[2, 0])
    else:
        places = (cells[0, 0], cells[0, 1], cells[1, :])
    first, second, below = (figure.add_subplot(place) for place in places)
    return figure, (first, second, below)
