"""Figure: how many GPU-hours were lost, by cause.

With G the run's GPUs, Gᵢ those of the inference nodes, Gₜ the trainer's (from the config; where it
names none, each engine and the trainer count as one):

    held             Σ over launch attempts of (end − start) × G
    queue            Σ of the time between a launch attempt's end and the next one's start × G;
                     they were not held, but the run could not go on
    start-up         Σ over launch attempts of (first trajectory's start − start) × G
    idle engines     idle share of the load samples × (last trajectory's end − first's start) × Gᵢ
    idle trainer     Σ of the steps' wait × Gₜ
    recovery         Σ over engine faults of (that engine's next `ready` − fault) × its GPUs, and
                     Σ seconds of steps that a resume undid × G
    infrastructure   Σ seconds of trajectories without reward ÷ mean number under way × Gᵢ

The causes overlap (a lost trajectory also leaves an engine idle), so they do not add up to a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agentrl import events
from analysis import plot, throughput
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import of_run

Stretch = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    cause: str
    gpu_hours: float
    of_held: float
    """Share of the GPU-hours that the run held."""
    unit: str
    """`GPU-hours`; `device-hours` where the config names no GPU."""
    how: str
    """What was counted, in numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """How many devices a run has."""

    trainer: int
    inference: int
    engines: int
    is_told: bool
    """By the config; else each engine and the trainer count as one."""

    @property
    def unit(self) -> str:
        return "GPU-hours" if self.is_told else "device-hours"

    @property
    def all(self) -> int:
        return self.trainer + self.inference


def gpus(run: Run) -> Gpus:
    """Count the run's devices."""
    states = run.of(events.EngineState)
    seen = len({state.engine for state in states if state.state == "load"})
    if run.config is None:
        return Gpus(trainer=1, inference=max(1, seen), engines=max(1, seen), is_told=False)
    cluster, nodes = run.config.cluster, run.config.rollout.nodes
    engines = run.config.engine.count * nodes
    return Gpus(
        trainer=cluster.trainer.gpus_per_node or 1,
        inference=cluster.inference.gpus_per_node * nodes or engines,
        engines=engines,
        is_told=cluster.inference.gpus_per_node > 0,
    )


@remembered
def table(run: Run) -> list[Row]:
    held = list(attempts(run))
    has = gpus(run)
    seconds = sum(end - start for start, end in held)
    if seconds <= 0:
        return []
    whole = seconds * has.all / 3600
    found = [
        _queue(held, has),
        _start_up(run, held, has),
        _idle_engines(run, has),
        _idle_trainer(run, has),
        _recovery(run, has),
        _infrastructure(run, has),
    ]
    many = f"{len(held)} launch attempt{'s' * (len(held) != 1)}"
    found.insert(0, ("held", whole, f"{many} × {has.all} devices"))
    return [
        Row(cause=cause, gpu_hours=hours, of_held=hours / whole, unit=has.unit, how=how)
        for cause, hours, how in found
    ]


def attempts(run: Run) -> Iterator[Stretch]:
    """Yield when each launch attempt held its nodes; the whole run where nothing tells."""
    told = [(line.started, line.finished) for line in run.ledger if line.started]
    if told:
        yield from ((start, max(start, end)) for start, end in told)
    elif len(run.store):
        yield run.store.span()


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    lost = [row for row in rows if row.cause != "held"]
    figure, (axes,) = plot.grid(1, narrow=narrow, columns=1, height_in=2.6)
    plot.bars(
        axes,
        [row.cause for row in lost],
        [row.gpu_hours for row in lost],
        [f"{row.gpu_hours:,.3g} · {100 * row.of_held:.1f} % of held" for row in lost],
        colours=[plot.GREY, plot.GOLD, plot.SKY, plot.NAVY, plot.PURPLE, plot.ORANGE],
    )
    axes.set_xlabel(f"{rows[0].unit}; causes overlap")
    plot.save(figure, path, headline(rows), n=rows[0].how, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    lost = [row for row in rows if row.cause != "held"]
    most = max(lost, key=lambda row: row.gpu_hours)
    if not most.gpu_hours:
        return f"None of {rows[0].gpu_hours:,.3g} {most.unit} held went to a cause on record"
    return (
        f"Largest loss of {most.unit}: {most.cause}, {most.gpu_hours:,.3g} of "
        f"{rows[0].gpu_hours:,.3g} held ({100 * most.of_held:.0f} %)"
    )


def finding(rows: Sequence[Row]) -> str:
    told = (
        ""
        if rows[0].unit == "GPU-hours"
        else " The config names no GPU: an engine and the trainer count as one device each."
    )
    return f"{headline(rows)}; n = {rows[0].how}. Causes overlap, so they do not add up.{told}"


Loss = tuple[str, float, str]


def _queue(held: Sequence[Stretch], has: Gpus) -> Loss:
    ordered = sorted(held)
    gaps = [max(0.0, new[0] - old[1]) for old, new in pairwise(ordered)]
    return "queue", sum(gaps) * has.all / 3600, f"{len(gaps)} gaps, {sum(gaps):,.0f} s"


def _start_up(run: Run, held: Sequence[Stretch], has: Gpus) -> Loss:
    begins = sorted(done.start for done in run.of(events.TrajectoryEvent))
    seconds = 0.0
    for start, end in held:
        first = next((at for at in begins if start <= at <= end), end if begins else start)
        seconds += first - start
    return "start-up", seconds * has.all / 3600, f"{seconds:,.0f} s until a first trajectory"


def _idle_engines(run: Run, has: Gpus) -> Loss:
    rows = throughput.table(run)
    idle = throughput.idle_share(rows) if rows else 0.0
    if idle != idle:
        return "idle engines", 0.0, "unknown: no load samples"
    seconds = sum(row.seconds for row in rows)
    return "idle engines", idle * seconds * has.inference / 3600, f"idle {100 * idle:.0f} %"


def _idle_trainer(run: Run, has: Gpus) -> Loss:
    steps = run.of(events.Step)
    waited = sum(step.wait_s for step in steps)
    return "idle trainer", waited * has.trainer / 3600, f"{waited:,.0f} s in {len(steps)} steps"


def _recovery(run: Run, has: Gpus) -> Loss:
    ready = [state for state in run.of(events.EngineState) if state.state == "ready"]
    down = 0.0
    for fault in run.of(events.EngineFault):
        at = fault.end or fault.start
        down += next((s.start - at for s in ready if s.engine == fault.engine and s.start > at), 0)
    undone = _undone_seconds(run)
    hours = (down * has.inference / has.engines + undone * has.all) / 3600
    return "recovery", hours, f"engines down {down:,.0f} s, steps undone {undone:,.0f} s"


def _undone_seconds(run: Run) -> float:
    whole = sum(step.seconds for step in run.of(events.Step))
    return whole - sum(step.seconds for step in of_run(run).steps)


def _infrastructure(run: Run, has: Gpus) -> Loss:
    done = run.of(events.TrajectoryEvent)
    lost = [each for each in done if each.reward is None]
    if not lost:
        return "infrastructure", 0.0, "no trajectory was lost"
    stretch = max(each.end for each in done) - min(each.start for each in done)
    under_way = sum(each.seconds for each in done) / (stretch or 1.0)
    seconds = sum(each.seconds for each in lost)
    hours = seconds / (under_way or 1.0) * has.inference / 3600
    return "infrastructure", hours, f"{len(lost):,} lost trajectories, {seconds:,.0f} s"


FIGURE = Figure(
    name="gpu_hours",
    title="GPU-hours lost, by cause",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No file says how long the run held its nodes.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
