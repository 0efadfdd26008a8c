"""Figure: the loss of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis import plot
from analysis.figure import Figure
from analysis.run_files import Run

WINDOW = 5
"""Logged losses of the running mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    step: int
    loss: float
    """Mean over the assistant's tokens, nats."""


def table(run: Run) -> list[Row]:
    if run.sft is None or not run.sft.losses:
        return []
    every = run.sft.steps / len(run.sft.losses)
    return [Row(step=1 + int(i * every), loss=loss) for i, loss in enumerate(run.sft.losses)]


@plot.styled
def draw(rows: Sequence[Row], path: Path, *, narrow: bool = False) -> None:
    figure, (axes,) = plot.grid(1, narrow=narrow, columns=1, height_in=2.2)
    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    colour = plot.NAVY
    axes.plot(steps, losses, ".", color=colour, alpha=0.45, markersize=4.5, markeredgewidth=0)
    axes.plot(steps, plot.running_mean(losses, WINDOW), color=colour, linewidth=1.8)
    axes.set_xlim(0, steps[-1] + 1)
    axes.set_ylim(0, max(losses) * 1.08 or 1)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token")
    axes.set_title("Loss on the assistant's tokens")
    plot.save(figure, path, headline(rows), n=f"{len(rows):,} logged steps", png=not narrow)


def headline(rows: Sequence[Row]) -> str:
    return f"The loss went from {rows[0].loss:.2f} to {rows[-1].loss:.2f} nats a token"


def finding(rows: Sequence[Row]) -> str:
    return (
        f"{headline(rows)} (n = {len(rows):,} logged steps). Dots are "
        f"logged steps, the line is a running mean over {WINDOW} of them."
    )


FIGURE = Figure(
    name="sft_loss",
    title="Supervised fine-tuning",
    row=Row,
    table=table,
    draw=draw,
    finding=finding,
    missing="No fine-tuning was recorded.",
)
if __name__ == "__main__":
    raise SystemExit(FIGURE.main())
