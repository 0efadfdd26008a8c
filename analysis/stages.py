"""How long each stage of a run took, by what its files say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl import events
from analysis.run_files import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    kind: str
    """`sft`, `rl` or `evaluation`."""
    name: str
    seconds: float
    source: str
    """Where the number comes from."""


def stages(run: Run) -> list[Stage]:
    """Return the stages in order; one whose files give no times is left out."""
    return [stage for stage in _all(run) if stage.seconds > 0]


def _all(run: Run) -> Iterator[Stage]:
    if run.sft:
        yield Stage(kind="sft", name="SFT", seconds=run.sft.seconds, source="sft/*.sft.json")
    for each in run.ledger:
        yield Stage(
            kind="rl",
            name=f"RL (launch attempt {each.attempt})",
            seconds=each.finished - each.started if each.started else 0.0,
            source="ledger.jsonl: started to finished",
        )
    steps = run.of(events.Step)
    if steps and not run.ledger:
        yield Stage(
            kind="rl",
            name="RL",
            seconds=steps[-1].end - min(step.start for step in steps),
            source="events/: first step's start to last step's end",
        )
    for evaluation in run.evaluations:
        yield Stage(
            kind="evaluation",
            name=f"evaluation {evaluation.name}",
            seconds=evaluation.seconds,
            source=f"evaluations/{evaluation.name}/summary.json",
        )


def spoken(seconds: float) -> str:
    """Return a length of time for people: `42 s`, `5 min 12 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
