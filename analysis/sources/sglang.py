"""SGLang's server log and its Prometheus dump, as engine metrics.

The log's batch lines of 0.3 to 0.5.2x: `Decode batch. #running-req: …` (later `Decode batch, …`
and `Decode batch [33], …`), with `token usage`, or on hybrid models `full token usage`; the order
and the number of fields differ by version, so each is looked for by its name. Ray and container
runtimes put a prefix before the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isfinite
from pathlib import Path

import msgspec

from agentrl import events
from analysis.sources.adapted import Adapted

_LINE = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?"
    r"(?P<rank>(?: [A-Z]+\d+)*)\] (?P<text>.*)"
)
_BATCH = re.compile(r"(?P<kind>Decode|Prefill) batch\b")
_NUMBER = r":\s*(-?\d{1,15}(?:\.\d+)?)(?!\d)"
_FIELDS = {
    name: re.compile(re.escape(label) + _NUMBER)
    for name, label in {
        "running": "#running-req",
        "queued": "#queue-req",
        "throughput": "gen throughput (token/s)",
        "usage": "token usage",
    }.items()
}
_GRAPH = re.compile(r"cuda graph: (True|False)")
_FAULT = re.compile(
    r"Memory access fault|Received sigquit|Scheduler hit an exception|watchdog timeout|"
    r"CUDA error|HIP error|OutOfMemoryError|Segmentation fault",
    re.IGNORECASE,
)
_PASSED = {
    "HTTP access": re.compile(r"INFO:\s+\S+ - \""),
    "start-up": re.compile(
        r"server_args=|Load weight|Capture cuda graph|KV Cache is allocated|max_total_num_tokens|"
        r"Memory pool|Init torch|The server is fired up|Application startup|Uvicorn running|"
        r"Waiting for application|Started server process|Attention backend|Using "
    ),
    "cache": re.compile(r"Cache flushed|flush_cache|Abort|abort|Pause|Continue|weight"),
}
_SAMPLE = re.compile(
    r"(?P<name>sglang:[a-z_:0-9]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)(?: (?P<ms>\d{1,15}))?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_GAUGES = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "queued",
    "sglang:token_usage": "token_usage",
    "sglang:gen_throughput": "throughput",
    "sglang:cache_hit_rate": "cache_hit_rate",
    "sglang:generation_tokens_total": "generated_tokens",
    "sglang:num_retracted_reqs": "retracted",
    "sglang:num_aborted_requests_total": "aborted",
}
_WHOLE = {"running", "queued", "generated_tokens", "retracted", "aborted"}
_EPOCH = re.compile(r"(?<!\d)(1\d{9})(?:\d{3})?(?!\d)")


class SglangLog:
    """Decode and prefill batch lines."""

    name = "SGLang log"

    def fits(self, path: Path, head: str) -> bool:
        return bool(_BATCH.search(head)) or "server_args=ServerArgs(" in head

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add one engine_metrics event a decode batch line; times carry no zone: UTC is assumed."""
        for path in paths:
            with path.open(errors="replace") as file:
                for line in file:
                    into.lines += 1
                    self._line(line, path.stem, into)
        into.notes.append("its times name no zone; UTC was assumed.")

    def _line(self, line: str, engine: str, into: Adapted) -> None:
        found = _LINE.search(line)
        text = found["text"] if found else line
        if found and (batch := _BATCH.match(text)):
            if batch["kind"] == "Prefill":
                into.passed["prefill batches"] += 1
            else:
                self._decode(found, engine, into)
        elif fault := _FAULT.search(text):
            at = into.moment(found["time"], line) if found else 0.0
            if at is None:
                return
            into.known += 1
            into.events.append(
                events.EngineFault(
                    engine=engine, cause=fault[0], detail=text.strip()[:300], start=at, end=at
                )
            )
        elif not line.strip():
            into.passed["empty lines"] += 1
        else:
            kind = next((name for name, sign in _PASSED.items() if sign.search(text)), "")
            if kind:
                into.passed[kind] += 1
            else:
                into.refuse("no known line of SGLang", line)

    def _decode(self, found: re.Match[str], engine: str, into: Adapted) -> None:
        text = found["text"]
        got = {name: sign.search(text) for name, sign in _FIELDS.items()}
        running, usage, rate = got["running"], got["usage"], got["throughput"]
        if running is None or rate is None:
            into.refuse("decode batch without running requests or throughput", text)
            return
        at = into.moment(found["time"], text)
        if at is None:
            return
        graph = _GRAPH.search(text)
        into.known += 1
        into.events.append(
            events.EngineMetrics(
                engine=f"{engine}{found['rank'].replace(' ', '/')}",
                running=int(float(running[1])),
                queued=int(float(got["queued"][1])) if got["queued"] else 0,
                token_usage=float(usage[1]) if usage else 0.0,
                throughput=float(rate[1]),
                graph_passes=int(graph is not None and graph[1] == "True"),
                eager_passes=int(graph is not None and graph[1] == "False"),
                start=at,
                end=at,
            )
        )


class SglangMetrics:
    """A dump of /metrics: the text that Prometheus reads."""

    name = "SGLang Prometheus dump"

    def fits(self, path: Path, head: str) -> bool:
        del path
        return "# TYPE sglang:" in head or head.startswith("sglang:")

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add one engine_metrics event a dump and rank.

        The time is the sample's own, else digits of the epoch in the file's name, else the file's
        time of change, and that is said.
        """
        for path in paths:
            named = _EPOCH.search(path.name)
            at = float(named[1]) if named else path.stat().st_mtime
            ranks: dict[str, dict[str, float]] = {}
            for line in path.read_text(errors="replace").splitlines():
                into.lines += 1
                at = self._line(line, ranks, into) or at
            if not named:
                into.notes.append(f"{path.name} names no time; its time of change was taken.")
            into.events += [
                _metrics(f"{path.parent.name}{rank}", values, at) for rank, values in ranks.items()
            ]

    def _line(self, line: str, ranks: dict[str, dict[str, float]], into: Adapted) -> float:
        if not line.strip() or line.startswith("#"):
            into.passed["comments"] += 1
            return 0.0
        found = _SAMPLE.match(line)
        if found is None:
            into.refuse("no sample of SGLang", line)
            return 0.0
        name = _GAUGES.get(found["name"])
        labels = dict(_LABEL.findall(found["labels"] or ""))
        if name is None or labels.get("priority"):
            into.passed["other metrics"] += 1
            return 0.0
        rank = "".join(f"/{key}{labels[key]}" for key in ("dp_rank", "tp_rank") if key in labels)
        value = _finite(found["value"])
        if value is None:
            into.refuse("sample without a number", line)
            return 0.0
        ranks.setdefault(rank, {})[name] = value
        into.known += 1
        return float(found["ms"]) / 1000 if found["ms"] else 0.0


def _finite(text: str) -> float | None:
    """Return a number, or None: Prometheus also writes NaN and +Inf."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _metrics(engine: str, values: dict[str, float], at: float) -> events.EngineMetrics:
    told = {name: int(value) if name in _WHOLE else value for name, value in values.items()}
    fields = {"kind": "engine_metrics", "engine": engine, "start": at, "end": at, **told}
    return msgspec.convert(fields, events.EngineMetrics)
