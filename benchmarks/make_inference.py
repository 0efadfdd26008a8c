"""The inference nodes of a made run: trajectories of a known shape, and what engines say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, pi, sin
from pathlib import Path
from random import Random

import msgspec

from agentrl import events

BEGIN = 1_790_000_000.0
NODES = ("inf0", "inf1", "inf2")
ENGINES = 8
BATCH = 64
GROUP = 8
CAP = 80
UPDATE_S, WAIT_S, LOGPROB_S, PUBLISH_S, OTHER_S = 131.2, 60.2, 16.2, 23.1, 0.2
CYCLE_S = UPDATE_S + WAIT_S + LOGPROB_S + PUBLISH_S + OTHER_S
TAIL, AT_CAP, SOLVED_TURNS = 0.32, 0.84, 8
TAIL_BEND = 0.08
"""What one of two neighbouring batches has more, the other has less."""
SAMPLE_S = 30.0
BUSY, BUSY_BEND, WAVES = 0.8, 0.12, 5
"""Share of its time that an engine computes; how far it swings about it, and how often."""
LOST_EVERY = 280
DOWN_S = 90.0
"""How long an engine is down after a fault."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One trajectory before its events."""

    number: int
    start: float
    seconds: float
    turns: int
    is_solved: bool

    @property
    def is_lost_first(self) -> bool:
        return self.number % LOST_EVERY == LOST_EVERY // 2


def planned(shape: Shape, random: Random) -> Iterator[Plan]:
    """Yield the trajectories: the tail of each batch by its shape, turns by their counts."""
    turns = _turns(shape, random)
    for batch in range(shape.batches):
        low = batch * BATCH
        some = sorted(turns[low : low + BATCH])
        longest, last = shape.batches // 2 & ~1, shape.batches - 1 & ~1
        if not batch % 2:  # a pair of batches is alike but for its tails
            whole = random.uniform(1000, 1600)
        is_bent = batch & ~1 not in (longest, last)
        bend = (TAIL_BEND if batch % 2 else -TAIL_BEND) if is_bent else 0.0
        seconds = 1728.0 if batch == longest else whole
        ends = _ends(len(some), seconds, TAIL + bend, random)
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


def _ends(many: int, whole: float, tail: float, random: Random) -> list[float]:
    """Return `many` rising durations of which the ⌈0.9 n⌉-th is (1 − tail) × the last."""
    rank = ceil(0.9 * many)
    edge = (1 - tail) * whole
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
class Node:
    shape: Shape
    shift: float
    """Added to every time: the clock of this node is that far ahead."""
    texts: Sequence[bytes]


def write_node(folder: Path, node: str, plans: Sequence[Plan], its: Node, random: Random) -> None:
    path = folder / "events" / f"inference-{node}-100.jsonl"
    with path.open("wb") as file:
        for version in range(its.shape.batches + 1):
            at = published(version) + 3.0 + random.random() + its.shift
            proved = events.VersionEvent(
                version=version, phase="proved", engine="engine-0", start=at, end=at
            )
            file.write(_line(proved))
        for plan in plans:
            file.write(b"".join(_lines(plan, node, its, random)))
            if plan.is_lost_first:
                file.write(_lost(plan, its))
        for line in _engines(node, its, random):
            file.write(line)


def _lines(plan: Plan, node: str, its: Node, random: Random) -> Iterator[bytes]:
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
    yield _line(event)
    clock = event.end
    event = events.SandboxStart(
        trajectory=name, backend="apptainer", queued_s=spent["queued"], start=clock,
        end=clock + spent["queued"] + spent["start"],
    )  # fmt: skip
    yield _line(event)
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
    yield _line(event)
    task = f"org{plan.number % 12}__repo-{plan.number}"
    done = events.TrajectoryEvent(
        trajectory=name, draw=plan.number // GROUP, task=task,
        attempt=plan.number % GROUP, cause="turn_limit" if plan.turns == CAP else "submitted",
        reward=float(plan.is_solved), turns=plan.turns, tokens=1500 + 400 * plan.turns,
        sampled_tokens=120 * plan.turns, start=begin, end=begin + plan.seconds,
    )  # fmt: skip
    yield _line(done)


def _line(event: events.Event) -> bytes:
    return _encode(event) + b"\n"


def _lost(plan: Plan, its: Node) -> bytes:
    """Return the first try of a trajectory: its sandbox did not start."""
    name, start = f"{plan.number // GROUP}/{plan.number % GROUP}/lost", plan.start + its.shift
    end = start + 30.0
    begun = events.SandboxStart(
        trajectory=name, backend="apptainer", ok=False, detail="exit 255: no space left on device",
        start=start, end=end,
    )  # fmt: skip
    done = events.TrajectoryEvent(
        trajectory=name, draw=plan.number // GROUP, task=f"org{plan.number % 12}__lost",
        attempt=plan.number % GROUP, cause="sandbox_start", detail=begun.detail,
        start=start, end=end,
    )  # fmt: skip
    return _line(begun) + _line(done)


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


def text(random: Random, size: int) -> bytes:
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


def _engines(node: str, its: Node, random: Random) -> Iterator[bytes]:
    """Yield what a node's engines say of themselves: load samples, metrics, one's fault."""
    seconds = published(its.shape.batches) + 1728 - BEGIN
    for number in range(ENGINES):
        engine, busy = f"engine-{number}", 0.0
        for i in range(int(seconds / SAMPLE_S)):
            at = BEGIN + SAMPLE_S * i + its.shift
            wave = sin(2 * pi * WAVES * SAMPLE_S * i / seconds)
            running, waiting = random.randint(8, 24), random.randint(0, 3)
            yield _line(
                events.EngineState(
                    engine=engine, state="load", start=at, end=at, running=running, waiting=waiting,
                    generated_tokens=int(busy * 900), busy_s=busy,
                )
            )  # fmt: skip
            yield _line(
                events.EngineMetrics(
                    engine=engine, running=running, queued=waiting, start=at, end=at,
                    token_usage=0.45 + 0.25 * wave + random.uniform(-0.05, 0.05),
                )
            )  # fmt: skip
            busy += SAMPLE_S * (BUSY + BUSY_BEND * wave)
    broken, at = "engine-3", BEGIN + seconds / 2 + its.shift
    yield _line(events.EngineFault(engine=broken, cause="no token progress", start=at, end=at))
    at += DOWN_S
    yield _line(events.EngineState(engine=broken, state="ready", start=at, end=at))


def published(version: int) -> float:
    return BEGIN + 240 + version * CYCLE_S
