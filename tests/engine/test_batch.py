"""The scheduler's batch, in this process: what it samples is what transformers would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.batch import Batch
from agentrl.engine.loaded import LoadedModel
from agentrl.engine.requests import Request, SamplingParams

CONTEXT = 256
Score = Callable[..., list[float]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def batch(loaded: LoadedModel) -> Batch:
    return Batch(model=loaded, max_running=8, kept=8, context=CONTEXT, prefill_tokens=512)


def ask(prompt: list[int], new: int = 8, **params: object) -> Request:
    return Request(
        rid=str(prompt),
        prompt=np.array(prompt, dtype=np.int64),
        params=SamplingParams(max_new_tokens=new, **params),  # type: ignore[arg-type]
        extra_key="",
        stop_ids=frozenset(),
        deliver=lambda answer: None,
    )


def run(batch: Batch, requests: list[Request], steps: int = 10_000) -> None:
    """Run until all have ended, or for some steps."""
    waiting = list(requests)
    while steps and (waiting or len(batch)):
        steps -= 1
        if waiting and len(batch) < batch.max_running:
            waiting, _ = batch.join(waiting)
        else:
            batch.step()


def output(request: Request) -> list[int]:
    return [int(token) for token in request.tokens[len(request.prompt) :]]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(1, 120))] for _ in range(count)]


def assert_scores(requests: list[Request], reference: Score, temperature: float) -> None:
    for request in requests:
        expected = reference(request.tokens.tolist(), len(request.prompt), temperature)
        assert np.abs(request.logprobs - expected).max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_a_mixed_batch_has_the_log_probabilities_of_a_plain_forward(
    batch: Batch, reference: Score, temperature: float
) -> None:
    asked = [
        ask(ids, new=1 + 3 * at, temperature=temperature) for at, ids in enumerate(prompts(20))
    ]
    run(batch, asked)
    assert [len(output(one)) for one in asked] == [1 + 3 * at for at in range(20)]
    assert_scores(asked, reference, temperature)


def test_the_plain_forward_gives_the_same_as_the_fused_one(model: Path, reference: Score) -> None:
    loaded = LoadedModel(model, version="0", context=CONTEXT)
    assert loaded.is_fused
    loaded._fused = None
    batch = Batch(model=loaded, max_running=4, kept=2, context=CONTEXT, prefill_tokens=64)
    asked = [ask(ids) for ids in prompts(9)]
    run(batch, asked)
    assert_scores(asked, reference, 1.0)


def test_a_long_prompt_is_prefilled_in_chunks(batch: Batch, reference: Score) -> None:
    batch.prefill_tokens = 32
    asked = [ask(ids[:90] * 2, new=5) for ids in prompts(6, seed=3)]
    run(batch, asked)
    assert_scores(asked, reference, 1.0)


def test_the_next_turn_reuses_the_whole_conversation(batch: Batch, reference: Score) -> None:
    first = ask(prompts(1)[0] + [1, 2, 3], new=12)
    run(batch, [first])
    second = ask([*first.tokens.tolist(), 7, 8, 9], new=12)
    run(batch, [second])
    assert second.cached == len(first.tokens) - 1  # the last token sampled has no keys yet
    assert_scores([first, second], reference, 1.0)


def test_a_group_computes_its_prompt_once(batch: Batch, reference: Score) -> None:
    prompt = [5] * 40 + [6] * 40
    group = [ask(prompt) for _ in range(6)]
    run(batch, group)
    assert [one.cached for one in group] == [0] + [len(prompt) - 1] * 5
    assert len({tuple(output(one)) for one in group}) > 1
    assert_scores(group, reference, 1.0)


def test_a_retracted_request_goes_on_as_if_nothing_had_happened(
    batch: Batch, reference: Score
) -> None:
    calm, shaken = (ask([9, 8, 7], new=20, sampling_seed=3) for _ in range(2))
    run(batch, [calm])
    run(batch, [shaken], steps=8)
    batch.flush()
    run(batch, [batch.remove(0)])
    assert output(shaken) == output(calm)
    assert_scores([shaken], reference, 1.0)


def test_a_seed_gives_the_same_tokens_alone_and_in_any_crowd(batch: Batch) -> None:
    alone = [ask(ids, sampling_seed=at) for at, ids in enumerate(prompts(8))]
    for one in alone:
        run(batch, [one])
    crowd = [ask(ids, sampling_seed=at) for at, ids in enumerate(prompts(8))]
    batch.flush()
    run(batch, crowd[::-1])
    assert [output(one) for one in crowd] == [output(one) for one in alone]


def test_another_extra_key_shares_nothing(batch: Batch) -> None:
    run(batch, [ask([4] * 50)])
    stranger = ask([4] * 50)
    stranger.extra_key = "other"
    run(batch, [stranger])
    assert stranger.cached == 0


def test_new_weights_reuse_no_old_keys_and_running_rows_keep_theirs_to_themselves(
    model: Path, other_model: Path
) -> None:
    loaded = LoadedModel(model, version="0", context=CONTEXT)
    batch = Batch(model=loaded, max_running=4, kept=4, context=CONTEXT, prefill_tokens=512)
    mixed = ask([3] * 30, new=10)
    run(batch, [mixed], steps=5)
    loaded.load(other_model, version="1")
    batch.relabel()
    run(batch, [])
    late = ask([3] * 30)
    run(batch, [late])
    assert late.cached == 0
    assert mixed.spans() == [
        {"version": "0", "start": 0, "end": 5},
        {"version": "1", "start": 5, "end": 10},
    ]


def test_a_stop_token_ends_a_row_and_is_the_last_token(batch: Batch) -> None:
    open_end = ask([2, 3, 4], new=9, sampling_seed=1)
    run(batch, [open_end])
    stopped = ask([2, 3, 4], new=9, sampling_seed=1)
    stopped.stop_ids = frozenset({output(open_end)[4]})
    run(batch, [stopped])
    first = output(open_end).index(output(open_end)[4])
    assert output(stopped) == output(open_end)[: first + 1]


def test_a_full_context_is_used_to_its_last_token(batch: Batch, reference: Score) -> None:
    asked = [ask([1] * (CONTEXT - 3), new=3), ask([2] * (CONTEXT - 1), new=1), ask([3], new=255)]
    run(batch, asked)
    assert [len(one.tokens) for one in asked] == [CONTEXT] * 3
    assert_scores(asked, reference, 1.0)


def test_finished_rows_beyond_the_kept_ones_push_out_the_oldest(batch: Batch) -> None:
    for start in range(12):  # 8 are kept
        run(batch, [ask([start] * 20, new=1)])
    again = [ask([start] * 20, new=1) for start in (11, 0)]
    for one in again:
        run(batch, [one])
    assert [one.cached for one in again] == [19, 0]
