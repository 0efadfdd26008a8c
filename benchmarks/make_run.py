"""Makes a run directory of the published example's shape, seeded, with what is true of it known.

The shape: 4,211 trajectories of 300,500 model calls in batches of 64; steps of 131 s update, 60 s
wait and 16 s log-probabilities, with 23 s of publishing apart; 32 % of rollout time after 90 % of a
batch's trajectories; model calls 77 % of a trajectory; 84 % at the turn limit, solved ones in a
median of 8 turns; pass@1 7.3 → 12.8 → 27.5 % on 100 tasks × 4. With the text of every turn the
events are about 1 GB. `damage` adds what killed writers, requeues and apart clocks leave behind.

    python -m benchmarks.make_run FOLDER [--trajectories 4211] [--text 4700] [--damage]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random

import msgspec

from agentrl import events
from benchmarks.make_evaluations import write_evaluations

BEGIN = 1_790_000_000.0
NODES = ("inf0", "inf1", "inf2")
ENGINES = 8
BATCH = 64
GROUP = 8
CAP = 80
UPDATE_S, WAIT_S, LOGPROB_S, PUBLISH_S, OTHER_S = 131.2, 60.2, 16.2, 23.1, 0.2
CYCLE_S = UPDATE_S + WAIT_S + LOGPROB_S + PUBLISH_S + OTHER_S
TAIL, AT_CAP, SOLVED_TURNS = 0.32, 0.84, 8
SHARES = {
    "setup": 0.02,
    "queued": 0.01,
    "start": 0.03,
    "model": 0.77,
    "command": 0.11,
    "grade": 0.05,
}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How much to make."""

    trajectories: int = 4211
    calls: int = 300_500
    text: int = 0
    """Bytes of text with each turn, about; 0 leaves it out."""
    damage: bool = False
    seed: int = 0

    @property
    def batches(self) -> int:
        return ceil(self.trajectories / BATCH)


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
    pass_1: dict[str, float] = field(default_factory=dict)
    torn: int = 0
    nul: int = 0
    repeats: int = 0
    skew_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One trajectory before its events."""

    number: int
    start: float
    seconds: float
    turns: int
    is_solved: bool


def make(folder: Path, shape: Shape) -> Truth:
    """Write the run into `folder`; return what is true of it."""
    random = Random(shape.seed)
    truth = Truth()
    (folder / "events").mkdir(parents=True)
    plans = list(planned(shape, random))
    truth.trajectories, truth.calls = len(plans), sum(plan.turns for plan in plans)
    truth.at_cap = sum(plan.turns == CAP for plan in plans) / len(plans)
    texts = [_text(random, shape.text) for _ in range(257)] if shape.text else []
    for i, node in enumerate(NODES):
        mine = [plan for plan in plans if plan.number // GROUP % len(NODES) == i]
        shift = -12.5 if shape.damage and i == 2 else 0.0
        truth.skew_s = truth.skew_s or shift
        _write_node(folder, node, mine, _Node(shape=shape, shift=shift, texts=texts), random)
    _write_trainer(folder, shape, truth, random)
    truth.pass_1 |= write_evaluations(folder, random)
    if shape.damage:
        _damage(folder / "events", truth)
    return truth


def planned(shape: Shape, random: Random) -> Iterator[Plan]:
    """Yield the trajectories: the tail of each batch by its shape, turns by their counts."""
    turns = _turns(shape, random)
    for batch in range(shape.batches):
        low = batch * BATCH
        some = sorted(turns[low : low + BATCH])
        whole = 1728.0 if batch == shape.batches // 2 else random.uniform(1000, 1600)
        ends = _ends(len(some), whole, random)
        order = list(range(len(some)))
        random.shuffle(order)
        for place, number in enumerate(order):
            count, is_solved = some[place]
            yield Plan(
                number=low + number,
                start=BEGIN + 300 + batch * CYCLE_S,
                seconds=ends[place],
                turns=count,
                is_solved=is_solved,
            )


def _ends(many: int, whole: float, random: Random) -> list[float]:
    """Return `many` rising durations of which the ⌈0.9 n⌉-th is (1 − TAIL) × the last."""
    rank = ceil(0.9 * many)
    edge = (1 - TAIL) * whole
    early = sorted(random.uniform(0.1, 0.999) * edge for _ in range(rank - 1))
    late = sorted(random.uniform(edge * 1.001, whole) for _ in range(many - rank))
    return [*early, edge, *late[:-1], whole] if late else [*early, whole]


def _turns(shape: Shape, random: Random) -> list[tuple[int, bool]]:
    """Return (turns, solved) of each trajectory; together `shape.calls` calls."""
    capped = round(AT_CAP * shape.trajectories)
    rest = shape.trajectories - capped
    solved = [random.choice((5, 6, 7, 8, 8, 9, 10, 11)) for _ in range(rest * 45 // 100)]
    others = [random.randint(20, 60) for _ in range(rest - len(solved))]
    missing = shape.calls - CAP * capped - sum(solved) - sum(others)
    while missing and others:
        i = random.randrange(len(others))
        step = 1 if missing > 0 else -1
        if 12 < others[i] + step < CAP:
            others[i] += step
            missing -= step
    found = [(CAP, False)] * capped + [(n, True) for n in solved] + [(n, False) for n in others]
    random.shuffle(found)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    shape: Shape
    shift: float
    """Added to every time: the clock of this node is that far ahead."""
    texts: Sequence[bytes]


def _write_node(folder: Path, node: str, plans: Sequence[Plan], its: _Node, random: Random) -> None:
    path = folder / "events" / f"inference-{node}-100.jsonl"
    with path.open("wb") as file:
        for version in range(its.shape.batches + 1):
            at = _published(version) + 3.0 + random.random() + its.shift
            proved = events.VersionEvent(
                version=version, phase="proved", engine=f"{node}/0", start=at, end=at
            )
            file.write(_encode(proved) + b"\n")
        for plan in plans:
            file.write(b"".join(_lines(plan, node, its, random)))
        for line in _loads(node, its, random):
            file.write(line)


def _lines(plan: Plan, node: str, its: _Node, random: Random) -> Iterator[bytes]:
    """Yield a trajectory's events; its phases take exactly their shares of its time."""
    name = f"{plan.number // GROUP}/{plan.number % GROUP}/0"
    bend = 0.05 if plan.number % 2 else -0.05  # what one trajectory has more, the next has less
    spent = dict(SHARES)
    spent["model"] += bend
    spent["command"] -= bend
    spent = {phase: share * plan.seconds for phase, share in spent.items()}
    clock = plan.start + its.shift
    begin = clock
    event: events.Event = events.Setup(trajectory=name, start=clock, end=clock + spent["setup"])
    yield _encode(event) + b"\n"
    clock = event.end
    event = events.SandboxStart(
        trajectory=name, backend="apptainer", queued_s=spent["queued"], start=clock,
        end=clock + spent["queued"] + spent["start"],
    )  # fmt: skip
    yield _encode(event) + b"\n"
    clock = event.end
    think, act = spent["model"] / plan.turns, spent["command"] / plan.turns
    for turn in range(plan.turns):
        yield _call(name, node, turn, clock, clock + think, _of(its.texts, random))
        clock += think
        yield _tool(name, turn, clock, clock + act, _of(its.texts, random))
        clock += act
    event = events.Grade(
        trajectory=name, resolved=plan.is_solved, start=clock, end=clock + spent["grade"]
    )
    yield _encode(event) + b"\n"
    task = f"org{plan.number % 12}__repo-{plan.number}"
    done = events.TrajectoryEvent(
        trajectory=name, draw=plan.number // GROUP, task=task,
        attempt=plan.number % GROUP, cause="turn_limit" if plan.turns == CAP else "submitted",
        reward=float(plan.is_solved), turns=plan.turns, tokens=1500 + 400 * plan.turns,
        sampled_tokens=120 * plan.turns, start=begin, end=begin + plan.seconds,
    )  # fmt: skip
    yield _encode(done) + b"\n"


def _call(name: str, node: str, turn: int, start: float, end: float, text: bytes) -> bytes:
    return (
        b'{"kind":"model_call","trajectory":"%s","engine":"http://%s:%d","turn":%d,'
        b'"prompt_tokens":%d,"new_tokens":120,"finish":"stop"%s,"start":%r,"end":%r}\n'
    ) % (
        name.encode(), node.encode(), 30000 + turn % ENGINES, turn, 1500 + 400 * turn, text,
        start, end,
    )  # fmt: skip


def _tool(name: str, turn: int, start: float, end: float, text: bytes) -> bytes:
    return (
        b'{"kind":"tool_call","trajectory":"%s","turn":%d,"exit_code":0%s,"start":%r,"end":%r}\n'
    ) % (name.encode(), turn, text, start, end)


def _of(texts: Sequence[bytes], random: Random) -> bytes:
    return texts[int(random.random() * len(texts))] if texts else b""


def _text(random: Random, size: int) -> bytes:
    """Return a JSON member with text as models and shells write it: code, quotes, line ends."""
    words = (
        "def",
        "return",
        "self.assertEqual",
        '"path"',
        "import os\n",
        "    if x:",
        "# fix",
        "é",
    )
    text = ""
    while len(text) < size * random.uniform(0.25, 0.75):
        text += random.choice(words) + (" " if random.random() < 0.9 else "\n")
    return b',"text":' + json.dumps(text, ensure_ascii=False).encode()


def _loads(node: str, its: _Node, random: Random) -> Iterator[bytes]:
    last = _published(its.shape.batches) + 1728
    for engine in range(ENGINES):
        busy = 0.0
        for i in range(int((last - BEGIN) / 30)):
            at = BEGIN + 30.0 * i + its.shift
            state = events.EngineState(
                engine=f"http://{node}:{30000 + engine}", state="load", start=at, end=at,
                running=random.randint(8, 24), waiting=random.randint(0, 3),
                generated_tokens=int(busy * 900), busy_s=busy,
            )  # fmt: skip
            busy += 30 * 0.8
            yield _encode(state) + b"\n"


def _published(version: int) -> float:
    return BEGIN + 240 + version * CYCLE_S


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
            lines.append(_attempt(len(lines) + 1, begun, undone, step, "node failure"))
            begun = undone + 1.0
            loaded = events.CheckpointEvent(step=step, phase="loaded", start=begun, end=begun)
            writer.write(loaded)
            clock = begun + 30.0
    lines.append(_attempt(len(lines) + 1, begun, clock, steps, "the trainer finished"))
    for version in range(steps + 1):
        at = _published(version)
        writer.write(events.VersionEvent(version=version, phase="published", start=at, end=at + 2))
    writer.close()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _attempt(number: int, begun: float, ended: float, step: int, why: str) -> dict[str, object]:
    return {
        "attempt": number, "began": "started" if number == 1 else "resumed", "ended": why,
        "action": "requeue", "step_begin": 0, "step_end": step, "started": begun,
        "finished": ended,
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
    arguments.add_argument("--damage", action="store_true")
    given = arguments.parse_args(argv)
    calls = round(300_500 * given.trajectories / 4211)
    shape = Shape(
        trajectories=given.trajectories, calls=calls, text=given.text, damage=given.damage
    )
    truth = make(given.folder, shape)
    print(json.dumps(msgspec.to_builtins(truth.__dict__), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
