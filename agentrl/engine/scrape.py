"""SGLang's /metrics, as Prometheus writes it, down to the few numbers that a run keeps."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

PREFIX = "sglang:"
DELIVERED = ("time_to_first_token_seconds_count", "num_requests_total")
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)(?: -?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNumbers:
    """Sums over ranks; shares are means. What a version does not have stays 0."""

    running: float = 0.0
    queued: float = 0.0
    used_tokens: float = 0.0
    token_usage: float = 0.0
    """Share of the KV cache in use."""
    cache_hit_rate: float = 0.0
    """Share of prompt tokens that were not computed, since the start."""
    throughput: float = 0.0
    """Tokens generated a second, the engine's own figure."""
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    cached_tokens: float = 0.0
    requests: float = 0.0
    aborted: float = 0.0
    retracted: float = 0.0
    graph_passes: float = 0.0
    """Forward passes that replayed a graph, since the start."""
    eager_passes: float = 0.0
    decode_passes: float = 0.0
    """Of a rank, on average."""
    delivered: float = 0.0
    """Tokens and ends of replies that came to the server's port; 0 where it does not count each."""


Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Samples:
    """Return the samples by name, SGLang's prefix left off; buckets and odd lines are left out."""
    samples: Samples = defaultdict(list)
    for line in text.splitlines():
        if line.startswith("#") or "_bucket{" in line:  # most of a text, and nothing that is kept
            continue
        if (found := _LINE.match(line.strip())) is None:
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        samples[name.removeprefix(PREFIX)].append((dict(_LABEL.findall(labels or "")), number))
    return dict(samples)


def numbers(text: str) -> EngineNumbers:
    """Return what a run keeps of the text of /metrics."""
    samples = parse(text)
    prompt, cached = _sum(samples, "prompt_tokens_total"), _sum(samples, "cached_tokens_total")
    passes = samples.get("cuda_graph_passes_total", [])
    graphs = sum(value for labels, value in passes if _is_graph(labels.get("mode", "")))
    retracted = _sum(samples, "num_retracted_requests_total")
    return EngineNumbers(
        running=_sum(samples, "num_running_reqs"),
        queued=_sum(samples, "num_queue_reqs"),
        used_tokens=_sum(samples, "num_used_tokens"),
        token_usage=_mean(samples, "token_usage"),
        cache_hit_rate=cached / prompt if prompt else _mean(samples, "cache_hit_rate"),
        throughput=_sum(samples, "gen_throughput"),
        prompt_tokens=prompt,
        generated_tokens=_sum(samples, "generation_tokens_total"),
        cached_tokens=cached,
        requests=_sum(samples, "num_requests_total"),
        aborted=_sum(samples, "num_aborted_requests_total"),
        retracted=retracted or _sum(samples, "num_retracted_reqs"),
        graph_passes=graphs,
        eager_passes=sum(value for _, value in passes) - graphs,
        decode_passes=_decode_passes(passes),
        delivered=_delivered(samples),
    )


def _delivered(samples: Samples) -> float:
    """Without its tokens after the first the count says too little; with drafts, too rarely.

    A pass of several tokens may step over the multiples at which SGLang hands a reply on.
    """
    later = _sum(samples, "inter_token_latency_seconds_count")
    if not later or _sum(samples, "spec_accept_length"):
        return 0.0
    return later + sum(_sum(samples, name) for name in DELIVERED)


def _decode_passes(passes: list[tuple[dict[str, str], float]]) -> float:
    """Return the passes of a rank: each has its own labels, and a sample for each mode."""
    ranks = {tuple(sorted((labels | {"mode": ""}).items())) for labels, _ in passes}
    decoded = [value for labels, value in passes if labels.get("mode", "").startswith("decode")]
    return sum(decoded) / max(len(ranks), 1)


def _is_graph(mode: str) -> bool:
    """`decode_cuda_graph` is one, `decode_none` is not."""
    return "graph" in mode


def _sum(samples: dict[str, Any], name: str) -> float:
    return float(sum(value for _, value in samples.get(name, [])))


def _mean(samples: dict[str, Any], name: str) -> float:
    found = samples.get(name, [])
    return float(sum(value for _, value in found) / len(found)) if found else 0.0
