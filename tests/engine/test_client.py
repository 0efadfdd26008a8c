"""The client against a small server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from served import served

from agentrl.config import EngineConfig
from agentrl.engine.base import Generation, Sampling, VersionSpan
from agentrl.engine.client import EngineClient
from agentrl.errors import EngineLost, RequestRefused

CONFIG = EngineConfig(retries=3, start_timeout_s=0.2, context_length=100)
SAMPLING = Sampling(max_new_tokens=10, temperature=1.0)
Step = Callable[[dict[str, Any]], web.Response]


def reply(
    ids: list[int], kind: str = "stop", spans: list[tuple[str, int, int]] | None = None
) -> Step:
    meta = {
        "finish_reason": {"type": kind},
        "weight_version": "4",
        "cached_tokens": len(ids),
        "output_token_logprobs": [[-0.5, one, None] for one in ids],
    }
    if spans:
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    return lambda body: web.json_response({"text": "", "output_ids": ids, "meta_info": meta})


def status(code: int) -> Step:
    return lambda body: web.Response(status=code, text="the engine's words")


class Script:
    """Answers /generate by `steps`, the last one again and again; keeps what was asked."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step(self.asked[-1])


def ask(script: Script, ids: list[int], *more_urls: str, **changes: Any) -> Generation:
    async def go() -> Generation:
        async with served(script.handle) as url:
            config = EngineConfig(**{**vars(CONFIG), **changes})
            async with EngineClient(lambda: [*more_urls, url], config) as client:
                return await client.generate(ids, SAMPLING, trajectory="1/0/0")

    return asyncio.run(go())


def test_an_aborted_answer_is_continued_from_its_tokens_with_spans_that_add_up() -> None:
    script = Script(
        reply([1, 2, 3], "abort", [("4", 0, 2), ("5", 2, 3)]),
        reply([], "abort"),
        reply([8, 9], "stop", [("5", 0, 1), ("6", 1, 2)]),
    )
    got = ask(script, [50, 51])
    assert got.token_ids == (1, 2, 3, 8, 9)
    assert got.versions == (
        VersionSpan(version=4, start=0, end=2),
        VersionSpan(version=5, start=2, end=4),
        VersionSpan(version=6, start=4, end=5),
    )
    assert (got.finish, len(got.logprobs), got.cached_tokens) == ("stop", 5, 3)
    assert script.asked[-1]["input_ids"] == [50, 51, 1, 2, 3]
    assert script.asked[-1]["sampling_params"]["max_new_tokens"] == 7


def test_without_spans_the_one_version_covers_the_answer() -> None:
    assert ask(Script(reply([1, 2])), [5]).versions == (VersionSpan(version=4, start=0, end=2),)


def test_503_is_sent_again_within_the_budget() -> None:
    script = Script(status(503), status(503), reply([1]))
    assert ask(script, [5]).token_ids == (1,)
    assert len(script.asked) == 3


def test_a_spent_budget_is_engine_lost_with_the_last_words() -> None:
    script = Script(status(503))
    with pytest.raises(EngineLost, match=r"4 sends failed.*the engine's words"):
        ask(script, [5])
    assert len(script.asked) == 4


@pytest.mark.parametrize("code", [400, 404, 500])
def test_other_errors_are_not_sent_again(code: int) -> None:
    script = Script(status(code))
    with pytest.raises(RequestRefused, match=f"answered {code}.*the engine's words"):
        ask(script, [5])
    assert len(script.asked) == 1


def text(code: int, words: str) -> Step:
    return lambda body: web.Response(status=code, text=words)


@pytest.mark.parametrize("code", [499, 400])
def test_a_request_aborted_before_it_began_is_sent_again(code: int) -> None:
    aborted = text(code, '{"error":{"message":"Request f62364-  was aborted"}}')
    script = Script(aborted, reply([1, 2], "abort"), aborted, reply([3]))
    assert ask(script, [5]).token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    "garbled",
    [
        text(200, "<html>"),
        text(200, '{"output_ids": [1]}'),
        text(200, '{"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}}'),
        text(
            200,
            '{"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, '
            '"output_token_logprobs": [[null, 1, null]]}}',
        ),
    ],
    ids=["no JSON", "no meta", "a token without a logprob", "a logprob that is no number"],
)
def test_an_answer_that_is_none_is_asked_for_again_and_never_trained_on(garbled: Step) -> None:
    assert ask(Script(garbled, reply([1])), [5]).token_ids == (1,)
    with pytest.raises(EngineLost, match=r"4 sends failed.*_Garbled"):
        ask(Script(garbled), [5])


def test_a_dead_address_costs_no_more_than_a_try() -> None:
    script = Script(reply([1]))
    assert ask(script, [5], "http://127.0.0.1:9").token_ids == (1,)


def test_no_engine_at_all_is_engine_lost_after_the_deadline() -> None:
    async def go() -> None:
        async with EngineClient(list, CONFIG) as client:
            await client.generate([1], SAMPLING, trajectory="t")

    with pytest.raises(EngineLost, match="no engine was routable"):
        asyncio.run(go())


def test_a_call_outlasts_a_restart_that_takes_longer_than_a_start() -> None:
    async def go() -> Generation:
        loop = asyncio.get_running_loop()
        back = loop.time() + 1.5 * CONFIG.start_timeout_s
        async with served(Script(reply([1])).handle) as url:
            listed = lambda: [url] if loop.time() > back else []  # noqa: E731
            async with EngineClient(listed, CONFIG) as client:
                return await client.generate([5], SAMPLING, trajectory="t")

    assert asyncio.run(go()).token_ids == (1,)


def test_a_silent_engine_is_engine_lost() -> None:
    class Silent(Script):
        async def handle(self, request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(EngineLost, match="request_timeout_s"):
        ask(Silent(), [5], request_timeout_s=0.2)


def test_an_engine_that_only_aborts_is_given_up() -> None:
    with pytest.raises(EngineLost, match="in a row without a token"):
        ask(Script(reply([], "abort")), [5])


def test_new_tokens_are_clamped_to_the_context_and_a_full_one_is_refused() -> None:
    script = Script(reply([1]))
    ask(script, [5] * 97)
    assert script.asked[0]["sampling_params"]["max_new_tokens"] == 3
    with pytest.raises(RequestRefused, match=r"context_length=100"):
        ask(script, [5] * 100)


def test_rids_are_unique_and_end_in_a_delimiter() -> None:
    script = Script(reply([1]))
    for _ in range(3):
        ask(script, [5])
    rids = [body["rid"] for body in script.asked]
    assert len(set(rids)) == 3
    assert all(len(rid) == 33 and rid.endswith("-") for rid in rids)


def test_the_prefix_cache_is_asked_for_under_the_name_of_the_weights() -> None:
    names = iter(["1-4-abc", "1-5-def"])
    script = Script(reply([1, 2], "abort"), reply([3]))

    async def go() -> None:
        async with (
            served(script.handle) as url,
            EngineClient(lambda: [url], CONFIG, weights=lambda: next(names)) as client,
        ):
            await client.generate([5], SAMPLING, trajectory="t")

    asyncio.run(go())
    assert [body["extra_key"] for body in script.asked] == ["1-4-abc", "1-5-def"]


def test_more_than_a_hundred_requests_run_at_once() -> None:
    async def go() -> int:
        running = peak = 0
        everyone = asyncio.Event()

        class Gate(Script):
            async def handle(self, request: web.Request) -> web.Response:
                nonlocal running, peak
                running += 1
                peak = max(peak, running)
                if running == 150:
                    everyone.set()
                await everyone.wait()
                return reply([1])({})

        async with served(Gate().handle) as url, EngineClient(lambda: [url], CONFIG) as client:
            await asyncio.gather(
                *(client.generate([1], SAMPLING, trajectory=str(one)) for one in range(150))
            )
        return peak

    assert asyncio.run(go()) == 150
