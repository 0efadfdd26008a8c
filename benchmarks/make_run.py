"""Makes a run directory of the published example's shape, seeded, with what is true of it known.

The shape: 4,211 trajectories of 300,500 model calls in batches of 64; steps of 131 s update, 60 s
wait and 16 s log-probabilities, with 23 s of publishing apart; 32 % of rollout time after 90 % of a
batch's trajectories; model calls 77 % of a trajectory; 84 % at the turn limit, solved ones in a
median of 8 turns; pass@1 7.3 → 12.8 → 27.5 % on 100 tasks × 4. With the text of every turn the
events are about 1 GB. Of every 280 trajectories one is lost first, one engine a node fails, and
groups are dropped as stale. `damage` adds what killed writers, requeues and apart clocks leave.

    python -m benchmarks.make_run FOLDER [--trajectories 4211] [--text 4700] [--seed 0] [--damage]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from agentrl import events
from benchmarks.make_evaluations import write_evaluations
from benchmarks.make_inference import (
    BATCH,
    BEGIN,
    CAP,
    DOWN_S,
    GROUP,
    LOGPROB_S,
    NODES,
    OTHER_S,
    PUBLISH_S,
    SHARES,
    SOLVED_TURNS,
    TAIL,
    UPDATE_S,
    WAIT_S,
    Node,
    Shape,
    planned,
    published,
    text,
    write_node,
)


@dataclass
class Truth:
    """What the analysis has to find."""

    step_s: float = UPDATE_S + WAIT_S + LOGPROB_S + OTHER_S
    update_s: float = UPDATE_S
    wait_s: float = WAIT_S
    logprob_s: float = LOGPROB_S
    publish_s: float = PUBLISH_S
    tail: float = TAIL
    model: float = SHARES["model"]
    at_cap: float = 0.0
    solved_turns: float = SOLVED_TURNS
    trajectories: int = 0
    calls: int = 0
    undone: int = 0
    lost: int = 0
    """Trajectories lost to infrastructure, besides those above."""
    faults: int = 0
    down_s: float = 0.0
    stale: int = 0
    pass_1: dict[str, float] = field(default_factory=dict)
    torn: int = 0
    nul: int = 0
    repeats: int = 0
    skew_s: float = 0.0


def make(folder: Path, shape: Shape) -> Truth:
    """Write the run into `folder`; return what is true of it."""
    random = Random(shape.seed)
    truth = Truth()
    (folder / "events").mkdir(parents=True)
    plans = list(planned(shape, random))
    truth.trajectories, truth.calls = len(plans), sum(plan.turns for plan in plans)
    truth.lost = sum(plan.is_lost_first for plan in plans)
    truth.at_cap = sum(plan.turns == CAP for plan in plans) / (len(plans) + truth.lost)
    truth.faults, truth.down_s = len(NODES), len(NODES) * DOWN_S
    texts = [text(random, shape.text) for _ in range(257)] if shape.text else []
    for i, node in enumerate(NODES):
        mine = [plan for plan in plans if plan.number // GROUP % len(NODES) == i]
        shift = -12.5 if shape.damage and i == 2 else 0.0
        truth.skew_s = truth.skew_s or shift
        write_node(folder, node, mine, Node(shape=shape, shift=shift, texts=texts), random)
    _write_trainer(folder, shape, truth, random)
    truth.pass_1 |= write_evaluations(folder, random)
    if shape.damage:
        _damage(folder / "events", truth)
    return truth


def _write_trainer(folder: Path, shape: Shape, truth: Truth, random: Random) -> None:
    """Write steps with three resumes, each of which undoes two steps, and the ledger of them."""
    steps = shape.batches
    cuts = [steps * i // 4 for i in (1, 2, 3)] if steps >= 16 else []
    lines: list[dict[str, object]] = []
    writer = events.EventWriter(folder / "events", "trainer", node="trn0")
    clock, begun = BEGIN + 300.0, BEGIN
    for step in range(1, steps + 1):
        clock = _write_step(writer, step, clock, random)
        if step in cuts:
            undone = clock
            for extra in (1, 2):
                undone = _write_step(writer, step + extra, undone, random)
            truth.undone += 2
            lines.append(_attempt(lines, (begun, undone), step, "node failure"))
            begun = undone + 1.0
            loaded = events.CheckpointEvent(step=step, phase="loaded", start=begun, end=begun)
            writer.write(loaded)
            clock = begun + 30.0
    lines.append(_attempt(lines, (begun, clock), steps, "the trainer finished"))
    for version in range(steps + 1):
        at = published(version)
        writer.write(events.VersionEvent(version=version, phase="published", start=at, end=at + 2))
    for draw in range(3):
        drop = events.Drop(what="group", reason="stale", draw=draw, start=clock, end=clock)
        writer.write(drop)
        truth.stale += 1
    writer.close()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _attempt(
    before: list[dict[str, object]], span: tuple[float, float], step: int, why: str
) -> dict[str, object]:
    return {
        "attempt": len(before) + 1, "began": "resumed" if before else "started", "ended": why,
        "action": "requeue", "step_begin": before[-1]["step_end"] if before else 0,
        "step_end": step, "started": span[0], "finished": span[1],
    }  # fmt: skip


def _write_step(writer: events.EventWriter, step: int, start: float, random: Random) -> float:
    bend = 1.0 if step % 2 else -1.0  # the mean of any two neighbours is the shape's
    wait, update = WAIT_S + bend, UPDATE_S - bend
    whole = wait + update + LOGPROB_S + PUBLISH_S + OTHER_S
    grown = step / (step + 60)
    event = events.Step(
        step=step, version=step, wait_s=wait, logprob_s=LOGPROB_S, update_s=update,
        publish_s=PUBLISH_S, start=start, end=start + whole,
        metrics={
            "reward": 0.1 + 0.2 * grown + random.gauss(0, 0.03), "groups": float(BATCH // GROUP),
            "zero_signal": float(random.randint(0, 4)), "trajectories": float(BATCH),
            "sampled_tokens": 120.0 * 71 * BATCH, "grad_norm": abs(random.gauss(0.5, 0.1)),
            "entropy": 0.7 - 0.2 * grown, "ess": min(1.0, random.gauss(0.93, 0.02)),
            "gap": 0.77 if step == 60 else abs(random.gauss(0.011, 0.002)),
            "staleness_mean": random.uniform(1, 3),
        },
    )  # fmt: skip
    writer.write(event)
    return start + whole


def _damage(folder: Path, truth: Truth) -> None:
    """Leave a torn line, a hole of NUL bytes, and a segment that a requeue wrote again."""
    first, second = (folder / f"inference-{node}-100.jsonl" for node in NODES[:2])
    again = [
        line for line in first.read_bytes().splitlines(keepends=True) if b'"kind":"grade"' in line
    ]
    (folder / "inference-inf0-200.jsonl").write_bytes(b"".join(again))
    truth.repeats = len(again)
    with first.open("ab") as file:
        file.write(b'{"kind":"model_call","trajectory":"0/0/0","eng')
    truth.torn = 1
    with second.open("ab") as file:
        file.write(bytes(4096) + b"\n")
    truth.nul = 1


def main(argv: Sequence[str]) -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--trajectories", type=int, default=4211)
    arguments.add_argument("--text", type=int, default=4700)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--damage", action="store_true")
    given = arguments.parse_args(argv)
    calls = round(300_500 * given.trajectories / 4211)
    shape = Shape(
        trajectories=given.trajectories, calls=calls, text=given.text, damage=given.damage,
        seed=given.seed,
    )  # fmt: skip
    truth = make(given.folder, shape)
    print(json.dumps(msgspec.to_builtins(truth.__dict__), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
