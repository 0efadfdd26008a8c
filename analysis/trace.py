"""A window of a run as Chrome trace JSON, which Perfetto and chrome://tracing open.

A process is a node, a thread one trajectory's slot, an engine or the trainer. Viewers fail on very
large files, so a window has a bound on its events: what is past it is left out, and counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from pathlib import Path

import msgspec

from agentrl import events
from agentrl.handoff.publish import publish_bytes
from analysis.run_files import Run, load_run
from analysis.window import Window

MOST = 200_000
"""Spans in a trace; about 40 MB."""
WINDOW_S = 600.0
"""Length of the window that `report` exports: around the longest step."""
SPANS: dict[type[events.Event], str] = {
    events.SandboxStart: "sandbox start",
    events.Setup: "set-up",
    events.ModelCall: "model call",
    events.ToolCall: "command",
    events.Grade: "grade",
}
STEP_PARTS = ("wait", "update", "logprob", "publish", "checkpoint")
Json = dict[str, object]


def write_trace(run: Run, path: Path, *, most: int = MOST) -> str:
    """Write the spans of `run` to `path`; say what is in it."""
    spans = sorted(_spans(run), key=lambda span: float(str(span["ts"])))
    left_out = max(0, len(spans) - most)
    found = [*spans[:most], *_names(run)]
    publish_bytes(path, msgspec.json.encode({"traceEvents": found, "displayTimeUnit": "ms"}))
    more = f"; {left_out:,} later ones left out: take a shorter window" if left_out else ""
    return f"{min(most, len(spans)):,} spans{more}"


def chosen(run: Run) -> Run:
    """Return the part of a run that a report exports: some minutes around its longest step."""
    steps = run.of(events.Step)
    first, last = run.store.span()
    if last - first <= WINDOW_S:
        return run
    middle = max(steps, key=lambda step: step.seconds).start if steps else (first + last) / 2
    since = max(first, min(middle - WINDOW_S / 2, last - WINDOW_S))
    return run.within(since, since + WINDOW_S)


def _spans(run: Run) -> Iterator[Json]:
    done = run.of(events.TrajectoryEvent)
    lanes, nodes = _lanes(done), dict(zip(map(id, done), _nodes(run), strict=True))
    place = {each.trajectory: (nodes[id(each)], lanes[id(each)]) for each in done}
    for each in done:
        more = {"task": each.task, "cause": each.cause, "reward": each.reward}
        node, lane = place[each.trajectory]
        yield _span(f"trajectory {each.trajectory}", each, node, lane, more)
    for kind, name in SPANS.items():
        for span in run.of(kind):
            node, lane = place.get(str(getattr(span, "trajectory", "")), ("unfinished", 0))
            yield _span(name, span, node, lane, _facts(span))
    for step in run.of(events.Step):
        yield _span(f"step {step.step}", step, "trainer", 0, step.metrics)
        at = step.start
        for part in STEP_PARTS:
            seconds = getattr(step, f"{part}_s")
            if seconds > 0:  # parts follow each other; their order in the step is not recorded
                piece = events.Event(start=at, end=at + seconds)
                yield _span(part, piece, "trainer", 1, {})
                at += seconds
    for fault in run.of(events.EngineFault):
        yield _span(f"fault: {fault.cause}", fault, "engines", 0, {"engine": fault.engine})


def _span(name: str, span: events.Event, node: str, lane: int, more: object) -> Json:
    return {
        "name": name,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": max(0.0, span.end - span.start) * 1e6,
        "pid": node,
        "tid": lane,
        "args": more,
    }


def _facts(span: events.Event) -> Json:
    skipped = ("start", "end")
    return {k: v for k, v in msgspec.structs.asdict(span).items() if k not in skipped}


def _nodes(run: Run) -> list[str]:
    return [f"node {name}" for name in run.store.nodes(events.TrajectoryEvent)]


def _lanes(done: Sequence[events.TrajectoryEvent]) -> dict[int, int]:
    """Give each trajectory the lowest lane that is free when it starts."""
    lanes: dict[int, int] = {}
    busy: list[tuple[float, int]] = []
    heapify(busy)
    for each in sorted(done, key=lambda each: each.start):
        if busy and busy[0][0] <= each.start:
            lane = busy[0][1]
            heapreplace(busy, (each.end, lane))
        else:
            lane = len(busy)
            busy.append((each.end, lane))
            heapify(busy)
        lanes[id(each)] = lane
    return lanes


def _names(run: Run) -> Iterator[Json]:
    for node in sorted({*_nodes(run), "trainer"}):
        yield {"name": "process_name", "ph": "M", "pid": node, "tid": 0, "args": {"name": node}}


def main(argv: Sequence[str]) -> int:
    """Write report/trace.json of each run."""
    arguments = argparse.ArgumentParser(prog="python -m analysis.trace", description=__doc__)
    arguments.add_argument("runs", metavar="RUN", nargs="+")
    arguments.add_argument("--since", default="", help="2026-11-30T01:00, or 90m after the begin")
    arguments.add_argument("--until", default="")
    given = arguments.parse_args(argv)
    for name in given.runs:
        is_given = given.since or given.until
        window = Window(since=given.since, until=given.until) if is_given else None
        run = load_run(Path(name), window=window)
        path = run.report / "trace.json"
        said = write_trace(run if is_given else chosen(run), path)
        print(f"{path}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
