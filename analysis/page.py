"""Runs as one HTML page: everything inlined, and all text that a run holds escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentrl.config import to_yaml
from analysis import faults, gpu_hours, plot, solve_rate, what_now
from analysis.evaluations import model_label
from analysis.figure import Written
from analysis.run_files import Run
from analysis.stages import spoken, stages
from analysis.steps import of_run
from analysis.summary import Card, cards, sentences

LETTERS = 2000
"""Of one text on the page; the CSV files and summary.json hold the whole."""


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
    traced: str = ""
    """What trace.json holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Top:
    """A figure of several runs, before the sections."""

    drawing: Drawing
    table: Table


def render(sections: Sequence[Section], tops: Sequence[Top] = ()) -> str:
    """Return the page. What comes from a run is escaped; only our own drawings are not."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_together,
    )
    return environment.get_template("page.html.jinja").render(sections=sections, tops=tops)


def _together(value: object) -> object:
    """Keep a number and its sign on one line, and text short; drawings stay as they are."""
    if type(value) is not str:
        return value
    return plot.together(value if len(value) <= LETTERS else f"{value[:LETTERS]}…")


def top(written: Written, table: Table) -> Top:
    return Top(drawing=drawing(written), table=table)


def drawing(written: Written) -> Drawing:
    """Return a figure as the page shows it."""
    return Drawing(
        name=written.name,
        title=written.title,
        finding=written.finding,
        wide=_inline(written.svg, written.title),
        narrow=_inline(written.narrow_svg, written.title),
    )


def section(run: Run, figures: Sequence[Written], *, name: str = "", traced: str = "") -> Section:
    return Section(
        name=name or run.name,
        sentences=tuple(sentences(run)),
        cards=tuple(cards(run)),
        drawings=tuple(map(drawing, figures)),
        tables=(_advice(run), _rates(run), _lineage(run), _faults(run), hours(run), _stages(run)),
        provenance=_provenance(run),
        config=to_yaml(run.config) if run.config else "",
        problems=run.problems,
        traced=traced,
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
    rows = [row for row in faults.by_cause(faults.table(run)) if row.kind != "launch attempt"]
    return Table(
        title="Losses and faults",
        columns=("kind", "cause", "count", "example"),
        rows=tuple((row.kind, row.cause, f"{row.count:,}", row.detail[:300]) for row in rows),
        note="" if rows else "Nothing was lost, and nothing broke.",
    )


def _advice(run: Run) -> Table:
    rows = what_now.table(run)
    return Table(
        title="What now",
        columns=("what holds it back", "evidence", "setting", "change"),
        rows=tuple((row.what, row.evidence, row.setting, row.change) for row in rows),
        note="" if rows else what_now.FIGURE.missing,
    )


def _lineage(run: Run) -> Table:
    resumes = ", ".join(map(str, of_run(run).resumes)) or "none"
    return Table(
        title="Launch attempts",
        columns=("attempt", "began", "ended", "steps", "time"),
        rows=tuple(
            (
                str(line.attempt),
                line.began,
                line.ended,
                f"{line.step_begin} to {line.step_end}",
                spoken(max(0.0, line.finished - line.started)) if line.started else "",
            )
            for line in run.ledger
        ),
        note=f"Resumed after steps: {resumes}." if run.ledger else "No ledger was found.",
    )


def hours(run: Run) -> Table:
    """Return GPU-hours by cause; what cannot be known is said to be unknown."""
    rows = gpu_hours.table(run)
    return Table(
        title="GPU-hours",
        columns=("cause", rows[0].unit if rows else "GPU-hours", "of held", "counted"),
        rows=tuple(
            (row.cause, gpu_hours.spoken(row.gpu_hours), f"{100 * row.of_held:.1f} %", row.how)
            if isfinite(row.gpu_hours)
            else (row.cause, "unknown", "", row.how)
            for row in rows
        ),
        note=(
            "Causes overlap, so they do not add up. Without GPUs in the config, each engine and "
            "the trainer count as one."
            if rows
            else gpu_hours.FIGURE.missing
        ),
    )


def _provenance(run: Run) -> Table:
    known = {key: value for key, value in run.provenance.items() if value is not None}
    if isinstance(made := known.get("created"), int | float):
        known["created"] = datetime.fromtimestamp(made).astimezone().isoformat(" ", "seconds")
    facts = [(key, _plain(value)) for key, value in known.items()]
    facts.append(("events read", f"{len(run.store) + run.aside:,}"))
    facts.append(("event lines rejected", f"{sum(run.rejected.values()):,}"))
    return Table(title="Provenance", columns=("what", "value"), rows=tuple(facts))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
