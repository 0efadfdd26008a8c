"""A short list, by rule, of what holds a run back most: the evidence, and the setting to change.

Each rule measures one share of time or of work, compares it with a bound below which it is no
matter, and names a setting. The list is ordered by how far a share is above its bound (share ÷
bound). The bounds are judgements, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl import events
from analysis import cap_replay, long_tail, plot, step_time, throughput, trajectory_time
from analysis.figure import Figure
from analysis.memo import remembered
from analysis.run_files import Run
from analysis.table import whole_percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that holds the run back."""

    what: str
    share: float
    bound: float
    """Shares up to this are no matter."""
    evidence: str
    setting: str
    change: str

    @property
    def weight(self) -> float:
        return self.share / self.bound


Rule = Callable[[Run], Iterator[Row]]


@remembered
def table(run: Run) -> list[Row]:
    """Return what is above its bound, the worst first."""
    found = [row for rule in RULES for row in rule(run)]
    return sorted((row for row in found if row.share > row.bound), key=lambda row: -row.weight)


def _caps_hit(run: Run) -> Iterator[Row]:
    rows = long_tail.table(run)
    settings = {
        "turn_limit": "agent.max_turns",
        "token_limit": "agent.tokens_per_trajectory",
        "time_limit": "agent.trajectory_timeout_s",
    }
    replayed = {"turn_limit": "turns", "token_limit": "tokens"}
    caps = cap_replay.table(run)
    for cause, share in long_tail.limit_shares(rows).items() if rows else ():
        solved = long_tail.solved_turns(rows)
        turns = "" if solved is None else long_tail.counted(solved)
        told = f"; solved ones took a median of {turns}" if turns else ""
        best = cap_replay.best([row for row in caps if row.what == replayed.get(cause)])
        change = (
            f"lower it: a cap of {best.cap:,} {best.what} saves {whole_percent(best.saved)} of "
            f"batch time and loses at most {best.solved_cut:,} of {best.solved:,} solved"
            if best
            else "raise it, if those that it ends are near a solution; read some first"
        )
        yield Row(
            what=f"Trajectories end {long_tail.LIMITS[cause]}",
            share=share,
            bound=0.3,
            evidence=f"{whole_percent(share)} of {len(rows):,}{told}",
            setting=settings[cause],
            change=change,
        )


def _engines_idle(run: Run) -> Iterator[Row]:
    rows = throughput.table(run)
    share = throughput.idle_share(rows) if rows else float("nan")
    if share == share:
        mean = throughput.concurrent(rows)
        yield Row(
            what="Engines are idle",
            share=share,
            bound=0.25,
            evidence=f"{whole_percent(share)} of their sampled time, {mean:,.0f} under way",
            setting="rollout.concurrency",
            change="raise it (`agentrl plan` shows the smallest cap), or take fewer engines",
        )


def _trainer_waits(run: Run) -> Iterator[Row]:
    rows = step_time.table(run)
    if rows:
        share = step_time.idle_share(rows)
        yield Row(
            what="The trainer waits for groups",
            share=share,
            bound=0.2,
            evidence=f"{whole_percent(share)} of its time, n = {len(rows)} steps",
            setting="rollout.nodes",
            change="add inference nodes, or raise rollout.max_staleness by one",
        )


def _tail(run: Run) -> Iterator[Row]:
    rows = long_tail.table(run)
    if rows:
        share = long_tail.tail_share(rows)
        yield Row(
            what="A batch waits for its last attempts",
            share=share,
            bound=0.25,
            evidence=f"{whole_percent(share)} of rollout time after 90 % of a batch has ended",
            setting="agent.max_turns",
            change="see what a lower cap costs (cap replay); raise rollout.max_staleness",
        )


def _sandbox(run: Run) -> Iterator[Row]:
    rows = trajectory_time.table(run)
    if rows:
        shares = trajectory_time.shares(rows)
        start = shares["queued"] + shares["setup"] + shares["sandbox_start"]
        yield Row(
            what="Trajectories wait for their sandbox",
            share=start,
            bound=0.15,
            evidence=f"{whole_percent(start)} of a trajectory is queueing, set-up and start",
            setting="sandbox.max_starts",
            change="raise it while cores are free; else prepare images before the run",
        )


def _stale(run: Run) -> Iterator[Row]:
    drops = [drop for drop in run.of(events.Drop) if "stale" in drop.reason]
    many, groups = sum(drop.count for drop in drops), len(run.of(events.GroupEvent))
    if many and groups:
        share = many / (many + groups)
        yield Row(
            what="Groups are dropped as stale",
            share=share,
            bound=0.02,
            evidence=f"{many:,} of {many + groups:,} groups",
            setting="rollout.max_staleness",
            change="raise it by one, or lower rollout.concurrency",
        )


def _no_signal(run: Run) -> Iterator[Row]:
    steps = [s for s in run.of(events.Step) if {"zero_signal", "groups"} <= s.metrics.keys()]
    groups = sum(step.metrics["groups"] for step in steps)
    if groups:
        share = sum(step.metrics["zero_signal"] for step in steps) / groups
        yield Row(
            what="Groups teach nothing: all their rewards are equal",
            share=share,
            bound=0.4,
            evidence=f"{whole_percent(share)} of {groups:,.0f} groups",
            setting="rollout.attempts_per_task",
            change="raise it, or take tasks that the model solves sometimes",
        )


def _lost(run: Run) -> Iterator[Row]:
    done = run.of(events.TrajectoryEvent)
    lost = [each for each in done if each.reward is None and each.cause != "cancelled"]
    if lost:
        share = len(lost) / len(done)
        worst = max({e.cause for e in lost}, key=lambda cause: sum(e.cause == cause for e in lost))
        yield Row(
            what="Trajectories are lost to infrastructure",
            share=share,
            bound=0.02,
            evidence=f"{len(lost):,} of {len(done):,}, most by {worst}",
            setting="sandbox.start_timeout_s" if worst == "sandbox_start" else "rollout.retries",
            change="mend the cause first (What was lost and why); then raise it",
        )


RULES: tuple[Rule, ...] = (
    _caps_hit, _engines_idle, _trainer_waits, _tail, _sandbox, _stale, _no_signal, _lost,
)  # fmt: skip


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    names = [row.what for row in rows]
    row_in = plot.row_in(names, narrow=narrow, least=0.5)
    figure, (axes,) = plot.grid(1, narrow=narrow, columns=1, height_in=1.2 + row_in * len(rows))
    plot.bars(
        axes,
        names,
        [row.weight for row in rows],
        [
            f"{whole_percent(row.share)} against {whole_percent(row.bound)}\n{row.setting}"
            for row in rows
        ],
        colours=plot.SKY,
    )
    axes.axvline(1, color=plot.INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xlabel("share ÷ the bound of its rule; up to 1 it is no matter")
    n = f"{len(rows)} of {len(RULES)} rules, those above their bound"
    plot.save(figure, path, headline(rows), n=n, png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    return f"{rows[0].what} ({whole_percent(rows[0].share)}): look there first"


def finding(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"{first.what}: {first.evidence}. {first.setting}: {first.change}."


FIGURE = Figure(
    name="what_now",
    title="What now",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="By these rules nothing holds the run back, or too little is recorded to tell.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
