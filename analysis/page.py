"""Runs as one HTML page: everything inlined, and all text that a run holds escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentrl.config import to_yaml
from analysis import faults, plot, solve_rate
from analysis.evaluations import model_label
from analysis.figure import Written
from analysis.run_files import Run
from analysis.stages import spoken, stages
from analysis.summary import Card, cards, sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """One figure on the page."""

    name: str
    title: str
    finding: str
    wide: Markup
    narrow: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What the page says of one run."""

    name: str
    sentences: tuple[str, ...]
    cards: tuple[Card, ...]
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    provenance: Table
    config: str
    problems: tuple[str, ...]


def render(sections: Sequence[Section]) -> str:
    """Return the page. What comes from a run is escaped; only our own drawings are not."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(sections=sections)


def section(run: Run, figures: Sequence[Written]) -> Section:
    return Section(
        name=run.name,
        sentences=tuple(sentences(run)),
        cards=tuple(cards(run)),
        drawings=tuple(map(_drawing, figures)),
        tables=(_rates(run), _stages(run), _faults(run)),
        provenance=_provenance(run),
        config=to_yaml(run.config) if run.config else "",
        problems=run.problems,
    )


def _drawing(written: Written) -> Drawing:
    return Drawing(
        name=written.name,
        title=written.title,
        finding=written.finding,
        wide=_inline(written.svg, written.title),
        narrow=_inline(written.narrow_svg, written.title),
    )


def _inline(svg: str, title: str) -> Markup:
    """Turn a drawing's page colours into the page's own; matplotlib has escaped its text."""
    if not svg:
        return Markup("")
    body = svg[svg.index("<svg") :]
    for colour, name in ((plot.INK, "ink"), (plot.MUTED, "muted"), (plot.GRID, "line")):
        body = body.replace(colour, f"var(--{name})")
    body = body.replace(plot.PAPER, "var(--paper)")
    label = Markup('<svg role="img" aria-label="{}" ').format(title)
    return label + Markup(body.removeprefix("<svg "))


def _rates(run: Run) -> Table:
    rows = solve_rate.table(run)
    return Table(
        title="Solve rates",
        columns=("what", "split", "T", "value [95 %]", "tasks × attempts"),
        rows=tuple(
            (
                f"{model_label(row.model)} pass@{row.k}"
                if row.kind == "pass"
                else "RL − SFT pass@1, paired",
                row.split.replace("_", " "),
                f"{row.temperature:g}",
                solve_rate.percent(row) if row.kind == "pass" else solve_rate.points(row),
                f"{row.tasks} × {row.attempts}",
            )
            for row in rows
        ),
        note="" if rows else solve_rate.FIGURE.missing,
    )


def _stages(run: Run) -> Table:
    found = stages(run)
    return Table(
        title="Time of each stage",
        columns=("stage", "time", "from"),
        rows=tuple((stage.name, spoken(stage.seconds), stage.source) for stage in found),
        note="" if found else "No file says how long the stages took.",
    )


def _faults(run: Run) -> Table:
    rows = faults.table(run)
    return Table(
        title="Losses, faults and launch attempts",
        columns=("kind", "cause", "count", "example"),
        rows=tuple((row.kind, row.cause, f"{row.count:,}", row.detail[:300]) for row in rows),
        note="" if rows else faults.FIGURE.missing,
    )


def _provenance(run: Run) -> Table:
    facts = [(key, _plain(value)) for key, value in run.provenance.items()]
    facts.append(("events read", f"{len(run.events) + len(run.aside):,}"))
    facts.append(("event lines rejected", f"{sum(run.rejected.values()):,}"))
    return Table(title="Provenance", columns=("what", "value"), rows=tuple(facts))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
