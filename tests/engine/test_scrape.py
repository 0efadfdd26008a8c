"""SGLang's /metrics of two versions, and of the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.scrape import PREFIX, numbers, parse

TEXTS = Path(__file__).parent / "fixtures" / "metrics"


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_the_numbers_of_a_run_are_read(version: str) -> None:
    found = numbers((TEXTS / f"sglang_{version}.txt").read_text())
    assert (found.running, found.queued, found.token_usage) == (41, 3, 0.37)
    assert (found.throughput, found.generated_tokens) == (5120.31, 91_000)
    assert found.cache_hit_rate == 0.75, "of tokens, not the last batch's gauge"
    assert (found.graph_passes, found.eager_passes) == (90_211, 519)
    assert (found.requests, found.aborted, found.retracted) == (611, 4, 2)


def counted(accepted: float) -> str:
    """What two ranks computed, and what came to the port."""
    passes = [
        f'{PREFIX}cuda_graph_passes_total{{tp_rank="{rank}",mode="{mode}"}} {count}\n'
        for rank in (0, 1)
        for mode, count in (("decode_cuda_graph", 100), ("decode_none", 20), ("prefill_none", 9))
    ]
    return (
        f"{''.join(passes)}{PREFIX}spec_accept_length {accepted}\n{PREFIX}num_requests_total 3\n"
        f'{PREFIX}inter_token_latency_seconds_bucket{{le="+Inf"}} 77\n'
        f"{PREFIX}inter_token_latency_seconds_count 77\n"
        f"{PREFIX}time_to_first_token_seconds_count 4\n"
    )


def test_what_is_computed_and_what_comes_out_are_counted_apart() -> None:
    found = numbers(counted(0.0))
    assert (found.decode_passes, found.delivered) == (120, 77 + 4 + 3)


def test_with_speculation_the_port_is_not_held_to_its_count() -> None:
    assert numbers(counted(2.7)).delivered == 0


def test_labels_may_hold_quotes_and_commas() -> None:
    text = 'sglang:token_usage{model_name="a \\"b\\", c",tp_rank="0"} 0.5 1700000000\n'
    assert parse(text)["token_usage"] == [({"model_name": 'a \\"b\\", c', "tp_rank": "0"}, 0.5)]


def test_an_engine_without_these_metrics_reads_as_zeros() -> None:
    assert numbers("python_info 1.0\n").running == 0


def test_the_embedded_engine_is_read_by_the_same_names(server) -> None:
    server.generate([1, 2, 3], new=5)
    found = numbers(server.get("/metrics").text)
    assert found.generated_tokens >= 5
    assert found.prompt_tokens >= 3


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert type(numbers(text)) is type(numbers(""))
