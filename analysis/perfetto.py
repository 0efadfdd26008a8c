"""A window of a run as Chrome trace JSON, which Perfetto and chrome://tracing open.

A process is a node, a thread one lane of it. Viewers fail on very large files, so a file has a
bound on its spans: what is past it is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from agentrl.handoff.publish import publish_bytes
from analysis.lanes import Span

MOST = 200_000
"""Spans in a file; about 40 MB."""
Json = dict[str, object]


def write_trace(spans: Sequence[Span], path: Path, *, most: int = MOST) -> str:
    """Write spans, ordered by start, to `path`; say what is in it."""
    numbers = {node: i for i, node in enumerate(sorted({span.node for span in spans}), 1)}
    found = [_span(span, numbers[span.node]) for span in spans[:most]]
    names = list(_names(numbers))
    data = msgspec.json.encode({"traceEvents": [*names, *found], "displayTimeUnit": "ms"})
    publish_bytes(path, data)
    left_out = len(spans) - len(found)
    more = f"; {left_out:,} later ones left out: take a shorter window" if left_out else ""
    return f"{len(found):,} spans{more}"


def _span(span: Span, process: int) -> Json:
    return {
        "name": span.name,
        "cat": span.phase,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": max(0.0, span.end - span.start) * 1e6,
        "pid": process,
        "tid": span.lane,
        "args": span.facts,
    }


def _names(numbers: dict[str, int]) -> Iterator[Json]:
    for node, number in numbers.items():
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": node}}
        order = {"sort_index": number}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": order}
