"""Figure: how many GPU-hours were lost, by cause.

With G the run's GPUs, Gᵢ those of the inference nodes, Gₜ the trainer's (from the config; where it
names none, each engine and the trainer count as one):

    held             Σ over launch attempts of (end − start) × G
    queue            Σ of the time between a launch attempt's end and the next one's start × G;
                     they were not held, but the run could not go on
    start-up         Σ over launch attempts of (first trajectory's start − start) × G
    idle engines     Σ over engines of (time that load samples cover − busy time) × its GPUs
    idle trainer     Σ of the steps' wait × Gₜ
    recovery         Σ over engines of the time from a fault to the next `ready`, at most to the
                     launch attempt's end, × its GPUs, and Σ seconds of steps that were undone × G
    infrastructure   Σ seconds of trajectories without reward ÷ mean number under way × Gᵢ, the mean
                     over the held time from the first trajectory's start to the last one's end

A launch attempt that has no line in the ledger, for it goes on or its launcher was killed, is known
by its `begin` event and lasts until the run's last event. The causes overlap (a lost trajectory
also leaves an engine idle), so they do not add up to a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path

from agentrl import events
from analysis import plot, throughput
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.steps import of_run

Stretch = tuple[float, float]
A_RETRY = "request"
"""Cause of faults that a client saw: its engine may be well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    cause: str
    gpu_hours: float
    """Not a number where it cannot be known."""
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
    def an_engine(self) -> float:
        """GPUs of one engine."""
        return self.inference / self.engines

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
        _recovery(run, held, has),
        _infrastructure(run, held, has),
    ]
    many = f"{len(held)} launch attempt{'s' * (len(held) != 1)}"
    found.insert(0, ("held", whole, f"{many} × {has.all} devices"))
    return [
        Row(cause=cause, gpu_hours=hours, of_held=hours / whole, unit=has.unit, how=how)
        for cause, hours, how in found
    ]


def attempts(run: Run) -> Iterator[Stretch]:
    """Yield when each launch attempt held its nodes; the whole run where nothing tells."""
    told = {
        line.attempt: (line.started, max(line.started, line.finished))
        for line in run.ledger
        if line.started
    }
    _, last = run.store.span()
    begun = {e.attempt: e.start for e in run.of(events.LaunchAttempt) if e.phase == "begin"}
    for number, start in begun.items():
        later = [at for other, (at, _) in told.items() if other > number]
        told.setdefault(number, (start, max(start, min([last, *later]))))
    if told:
        yield from (told[number] for number in sorted(told))
    elif len(run.store):
        yield run.store.span()


def down_s(
    faults: Sequence[events.EngineFault],
    ready: Sequence[events.EngineState],
    held: Sequence[Stretch],
) -> float:
    """Return the seconds that engines were down: each from a fault until it was ready again.

    faults, ready: ordered by time. A fault while an engine is down begins nothing new. One that
    never came back was down until its launch attempt ended.
    """
    back: dict[str, list[float]] = defaultdict(list)
    for state in ready:
        back[state.engine].append(state.start)
    until: dict[str, float] = {}
    whole = 0.0
    for fault in faults:
        at = fault.start or fault.end
        end = next((end for start, end in held if start <= at <= end), at)
        end = next((again for again in back[fault.engine] if at < again < end), end)
        whole += max(0.0, end - max(at, until.get(fault.engine, at)))
        until[fault.engine] = max(end, until.get(fault.engine, end))
    return whole


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    lost = [row for row in rows if row.cause != "held"]
    figure, (axes,) = plot.grid(1, narrow=narrow, columns=1, height_in=2.6)
    plot.bars(
        axes,
        [row.cause for row in lost],
        [row.gpu_hours if isfinite(row.gpu_hours) else 0.0 for row in lost],
        [_label(row) for row in lost],
        colours=[plot.GREY, plot.GOLD, plot.SKY, plot.NAVY, plot.PURPLE, plot.ORANGE],
    )
    axes.set_xlabel(f"{rows[0].unit}; causes overlap")
    plot.save(figure, path, headline(rows), n=rows[0].how, png=not narrow)


def spoken(hours: float) -> str:
    """Return hours with three digits, in words where they are next to none."""
    return "under 0.001" if 0 < hours < 0.001 else f"{hours:,.3g}"


def _label(row: Row) -> str:
    if not isfinite(row.gpu_hours):
        return row.how
    return f"{spoken(row.gpu_hours)} · {100 * row.of_held:.1f} % of held"


def headline(rows: Sequence[Row]) -> str:
    lost = [row for row in rows if row.cause != "held" and isfinite(row.gpu_hours)]
    most = max(lost, key=lambda row: row.gpu_hours)
    if not most.gpu_hours:
        return f"None of {spoken(rows[0].gpu_hours)} {most.unit} held went to a cause on record"
    return (
        f"Largest loss of {most.unit}: {most.cause}, {spoken(most.gpu_hours)} of "
        f"{spoken(rows[0].gpu_hours)} held ({100 * most.of_held:.0f} %)"
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
    share = throughput.idle_share(rows)
    if share != share:
        return "idle engines", nan, "unknown: no load samples"
    seconds = share * throughput.sampled_s(rows)
    return "idle engines", seconds * has.an_engine / 3600, f"idle {100 * share:.0f} %"


def _idle_trainer(run: Run, has: Gpus) -> Loss:
    steps = run.of(events.Step)
    waited = sum(step.wait_s for step in steps)
    return "idle trainer", waited * has.trainer / 3600, f"{waited:,.0f} s in {len(steps)} steps"


def _recovery(run: Run, held: Sequence[Stretch], has: Gpus) -> Loss:
    ready = [state for state in run.of(events.EngineState) if state.state == "ready"]
    faults = [fault for fault in run.of(events.EngineFault) if fault.cause != A_RETRY]
    down = down_s(sorted(faults, key=lambda fault: fault.start), ready, held)
    undone = _undone_seconds(run)
    hours = (down * has.an_engine + undone * has.all) / 3600
    return "recovery", hours, f"engines down {down:,.0f} s, steps undone {undone:,.0f} s"


def _undone_seconds(run: Run) -> float:
    whole = sum(step.seconds for step in run.of(events.Step))
    return whole - sum(step.seconds for step in of_run(run).steps)


def _infrastructure(run: Run, held: Sequence[Stretch], has: Gpus) -> Loss:
    done = run.of(events.TrajectoryEvent)
    lost = [each for each in done if each.reward is None]
    if not lost:
        return "infrastructure", 0.0, "no trajectory was lost"
    low, high = min(each.start for each in done), max(each.end for each in done)
    seconds_held = sum(max(0.0, min(high, end) - max(low, start)) for start, end in held)
    under_way = sum(each.seconds for each in done) / (seconds_held or 1.0)
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
