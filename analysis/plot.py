"""How every figure looks: colours, sizes, and the files it is written to. No display needed."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from agentrl.handoff.publish import publish_bytes
from analysis.table import whole_percent

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

INK, MUTED, GRID, PAPER = "#1d2530", "#66717f", "#dfe3e8", "#fefefe"
"""Page colours by role; `page` replaces them, so that a figure follows light and dark."""
MODEL_COLOURS = {"base": "#c9ced4", "sft": "#7fb2dc", "rl": "#b5480f"}
"""Apart in lightness too, so that a grey print tells them apart."""
NAVY, ORANGE, GREEN, SKY, PURPLE, GREY, GOLD, PINK = (
    "#1f4e79",
    "#ee9550",
    "#2d6a4f",
    "#a9cce3",
    "#6c4f9e",
    "#c9ced4",
    "#d8b83a",
    "#d98cab",
)
"""Dark and light in turn: layers of a stack that touch differ in grey as well."""
MAIN = MODEL_COLOURS["rl"]
STYLE: dict[RcKeyType, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # else each drawing looks anew for room above the ticks
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
    "text.parse_math": False,
}
styled = matplotlib.rc_context(STYLE)
"""Decorates every `draw`: what it makes has this style, and nothing outside it changes."""
PNG_DPI = 150
WIDE_IN, NARROW_IN = 8.6, 4.4
"""Widths for a desktop and for a phone, inches."""
TICKS = 5
"""Parts that an axis has at most: few read well, and ticks are most of what is drawn."""
HEAD_IN = 0.7
"""Height of the finding above the panels and of n below them, inches."""
NAME_LETTERS = 18
"""Of a line of a name beside an axis, on a phone."""
LINE_IN = 0.15
"""Height of a line of a name, inches."""


def grid(
    panels: int, *, narrow: bool, columns: int = 2, height_in: float = 2.15
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `panels` axes; narrow ones stand in one column."""
    columns = 1 if narrow else min(columns, panels)
    rows = -(-panels // columns)
    size = (NARROW_IN if narrow else WIDE_IN, height_in * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [_add(figure, rows, columns, i + 1) for i in range(panels)]


def _add(figure: Figure, *place: Any) -> Axes:
    axes = figure.add_subplot(*place)
    axes.locator_params(nbins=TICKS)
    return axes


def column(heights_in: Sequence[float], *, narrow: bool) -> tuple[Figure, list[Axes]]:
    """Return a figure of axes below each other, each with its names as high as is said, inches."""
    size = (NARROW_IN if narrow else WIDE_IN, sum(heights_in) + HEAD_IN)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.add_gridspec(len(heights_in), 1, height_ratios=heights_in)
    return figure, [_add(figure, cells[i, 0]) for i in range(len(heights_in))]


def save(figure: Figure, path: Path, headline: str, *, n: str, png: bool = True) -> None:
    """Write `figure` as `path` with .svg and, unless switched off, .png in place of its ending.

    headline: the finding, set above the panels. n: what it rests on, set below them.
    """
    bold, small = FontProperties(size=10.5, weight="bold"), FontProperties(size=8)
    width_in = 0.97 * figure.get_figwidth()
    above = wrapped(together(plain(headline, 400)), width_in, bold)
    more_lines = max(0, above.count("\n") - 1)  # than HEAD_IN has room for
    figure.set_figheight(figure.get_figheight() + LINE_IN * more_lines)
    figure.suptitle(above, x=0.01, ha="left", fontproperties=bold, color=INK)
    below = wrapped(together(f"n = {n}"), width_in, small)
    if figure.legends and figure.get_figwidth() == NARROW_IN:  # n has no room beside it
        figure.legends[0].set_title(below, prop=small)
        figure.legends[0].get_title().set_color(MUTED)
        figure.legends[0].set_alignment("left")
    else:
        figure.supxlabel(below, x=0.99, ha="right", fontproperties=small, color=MUTED)
    with _quiet():
        _print(figure, path, png=png)


def _print(figure: Figure, path: Path, *, png: bool) -> None:
    if engine := figure.get_layout_engine():
        engine.execute(figure)  # once; each print would do it anew
    figure.set_layout_engine("none")
    data = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # savefig would draw each twice
        print_svg: Callable[..., None] = FigureCanvasSVG(figure).print_svg
        print_svg(data, metadata={"Date": None})
    publish_bytes(path.with_suffix(".svg"), data.getvalue())
    if png:
        data = BytesIO()
        figure.set_dpi(PNG_DPI)
        print_png: Callable[..., None] = FigureCanvasAgg(figure).print_png
        print_png(data)
        publish_bytes(path.with_suffix(".png"), data.getvalue())


def plain(text: str, most: int = 40) -> str:
    """Return text of a run as one short line that can be printed."""
    whole = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"


def together(text: str) -> str:
    """Keep a number and its sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%").replace(
        "n = ", "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"
    )


def wrapped(text: str, width_in: float, font: FontProperties) -> str:
    """Break text into lines that are no wider than is said, inches."""
    letters = int(len(text) * width_in / max(_width_in(text, font), width_in)) + 1
    while letters > 1:
        whole = textwrap.fill(text, letters)
        if max(_width_in(line, font) for line in whole.split("\n")) <= width_in:
            return whole
        letters -= 1
    return text


def _width_in(text: str, font: FontProperties) -> float:
    with _quiet():
        width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of letters that no font has: a box is drawn, and the CSV has the letter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


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


def bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    labels: Sequence[str],
    *,
    colours: Sequence[str] | str = MAIN,
) -> None:
    """Draw a horizontal bar a name, each with its label at its end."""
    axes.barh(range(len(names)), values, color=colours, height=0.7, edgecolor=INK, linewidth=0.4)
    for place, (width, label) in enumerate(zip(values, labels, strict=True)):
        axes.annotate(
            label,
            (width, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(names)), fitting(axes, names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(values, default=0) * 1.4 or 1)
    axes.grid(visible=False, axis="y")


def fitting(axes: Axes, names: Sequence[str]) -> list[str]:
    """Break names where the figure is a phone's, so that they leave room for the panel."""
    return broken(names, narrow=_is_narrow(axes))


def broken(names: Sequence[str], *, narrow: bool) -> list[str]:
    """Return names as they stand beside an axis; narrow ones in several lines."""
    shown = [together(plain(name, 60)) for name in names]
    return [textwrap.fill(name, NAME_LETTERS) for name in shown] if narrow else shown


def row_in(names: Sequence[str], *, narrow: bool, least: float) -> float:
    """Return the height of rows that keeps these names apart, inches; at least `least`."""
    lines = [name.count("\n") + 1 for name in broken(names, narrow=narrow)]
    return max(least, LINE_IN * max(lines, default=1) + 0.06)


def _is_narrow(axes: Axes) -> bool:
    canvas = axes.get_figure(root=True)
    return canvas is not None and canvas.get_figwidth() < (WIDE_IN + NARROW_IN) / 2


def time_bars(
    axes: Axes, names: Sequence[str], seconds: Sequence[float], colours: Sequence[str]
) -> None:
    """Draw a bar a part of a time, each with its seconds and its share of the whole."""
    total = sum(seconds) or 1.0
    labels = [f"{spoken(part)} · {whole_percent(part / total)}" for part in seconds]
    bars(axes, names, seconds, labels, colours=colours)
    axes.set_xlabel("seconds")


def spoken(seconds: float) -> str:
    """Return seconds with as many digits as they deserve."""
    return (
        f"{seconds:.0f} s"
        if seconds >= 100
        else f"{seconds:.1f} s"
        if seconds >= 10
        else (f"{seconds:.2f} s")
    )


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
    first, second, below = (_add(figure, place) for place in places)
    return figure, (first, second, below)


def stack(
    axes: Axes,
    edges: Sequence[float],
    layers: Sequence[tuple[str, str, Sequence[float]]],
) -> None:
    """Draw layers (name, colour, a value a bin) upon each other, with their names above them."""
    bottom = [0.0] * (len(edges) - 1)
    names = fitting(axes, [name for name, _, _ in layers])
    handles = []
    for number, (_, colour, values) in enumerate(layers):
        top = [low + value for low, value in zip(bottom, values, strict=True)]
        hatch = "" if number % 3 else "////"
        look: dict[str, Any] = {
            "facecolor": colour,
            "hatch": hatch,
            "edgecolor": PAPER,
            "linewidth": 0,
        }
        axes.stairs(top, edges, baseline=bottom, fill=True, **look)
        handles.append(Patch(label=names[number], **look))
        bottom = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2 if _is_narrow(axes) else 3,
        handlelength=1.4,
        borderaxespad=0.2,
        columnspacing=1.2,
    )


def gap_marks(axes: Axes, places: Sequence[float]) -> None:
    """Mark where a run was resumed."""
    for place in places:
        axes.axvline(place, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))


def keep_in_view(
    axes: Axes, places: Sequence[float], values: Sequence[float]
) -> list[tuple[float, float]]:
    """Set the y-range by the bulk of `values`; mark what is out of it, and return what is not.

    The bulk ends 1.5 times its own height above the 98th percentile (below the 2nd): values past
    that get a triangle at the edge with the number, so nothing is cut silently.
    """
    ordered = sorted(values)
    low, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.02, 0.98))
    height = (high - low) or abs(high) or 1.0
    bulk = [y for y in values if low - 1.5 * height <= y <= high + 1.5 * height]
    span = (max(bulk) - min(bulk)) or abs(max(bulk)) or 1.0
    floor = 0.0 if min(values) >= 0 else min(bulk) - 0.08 * span
    top = max(bulk) + max(0.14 * span, 0.06 * (max(bulk) - floor))
    axes.set_ylim(floor, top)
    seen = []
    for x, y in zip(places, values, strict=True):
        if floor <= y <= top:
            seen.append((x, y))
        else:
            _mark_out(axes, x, y, edge=top if y > top else floor)
    return seen


def _mark_out(axes: Axes, x: float, y: float, *, edge: float) -> None:
    is_high = y > edge
    axes.plot(x, edge, "^" if is_high else "v", color=INK, markersize=5, clip_on=False)
    axes.annotate(
        f"{y:.3g}",
        (x, edge),
        xytext=(4, -9 if is_high else 3),
        textcoords="offset points",
        fontsize=7.5,
    )
