"""/metrics of the embedded engine, under the names that SGLang gives the same things."""

from __future__ import annotations

from agentrl.engine.scheduler import Scheduler


def prometheus(scheduler: Scheduler, *, uptime_s: float) -> str:
    """Return Prometheus text."""
    batch, counters = scheduler.batch, scheduler.counters
    used, room = batch.used_tokens(), (batch.max_running + batch.kept) * batch.context
    prompt = max(counters.prompt_tokens, 1)
    gauges: dict[str, float] = {
        "num_running_reqs": len(batch),
        "num_queue_reqs": scheduler.queued,
        "num_paused_reqs": len(batch) + scheduler.queued if scheduler.paused else 0,
        "num_used_tokens": used,
        "max_total_num_tokens": room,
        "token_usage": used / room,
        "cache_hit_rate": counters.cached_tokens / prompt,
        "utilization": counters.busy_s / max(uptime_s, 1e-9),
    }
    totals: dict[str, float] = {
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.generated_tokens,
        "cached_tokens_total": counters.cached_tokens,
        "num_requests_total": counters.requests,
        "num_aborted_requests_total": counters.aborted,
        "num_retracted_requests_total": counters.retracted,
        "forward_execution_seconds_total": counters.busy_s,
        "scheduler_idle_seconds_total": max(uptime_s - counters.busy_s, 0),
    }
    lines = [line for name, value in gauges.items() for line in _metric(name, "gauge", value)]
    lines += [line for name, value in totals.items() for line in _metric(name, "counter", value)]
    return "\n".join([*lines, ""])


def _metric(name: str, kind: str, value: float) -> tuple[str, str]:
    return f"# TYPE sglang:{name} {kind}", f"sglang:{name} {value}"
