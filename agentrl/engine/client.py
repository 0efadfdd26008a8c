"""The asynchronous client of engines: SGLang's /generate, tokens in and tokens out."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from agentrl.config import EngineConfig
from agentrl.engine.base import Finish, Generation, Sampling, VersionSpan
from agentrl.engine.experts import Experts, ModelExperts
from agentrl.engine.router import Router
from agentrl.engine.wire import Wire
from agentrl.errors import EngineLost, RequestRefused
from agentrl.events import EngineFault, NoEvents, Writer, now

POLL_S = 0.02
"""First wait for a routable engine, seconds; it doubles up to MAX_BACKOFF_S."""
STARTS = 2
"""Of start_timeout_s that a call waits for an engine: a restart is an end, a wait for memory or for
the trainer's checkpoint, and then a start."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
ABORTED = (400, 499)
"""How SGLang answers a request that it had not begun when all were aborted; 0.5.17 by 499."""
MAX_FRUITLESS_ABORTS = 64
"""Aborted answers in a row without one new token after which the request is given up."""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct, array_like=True, gc=False):
    """Of SGLang's [log-probability, token, text] the first; null, for one that is no number, does
    not decode."""

    value: float


class _Finish(msgspec.Struct):
    type: Finish


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    cached_tokens: int = 0
    weight_version: str = "0"
    weight_versions: list[_Span] = []
    output_token_logprobs: list[_Logprob] = []
    routed_experts: bytes | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request brought; experts: None where none were asked for, or none came."""

    answer: _Answer
    experts: Experts | None = None


class _Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    sampling_seed: int | None = None


class _Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    input_ids: list[int]
    sampling_params: _Params
    rid: str
    return_logprob: bool
    logprob_start_len: int
    extra_key: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


_ANSWERS = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class _Reply:
    """The reply so far, joined from parts. Tuples: most replies have one part, copied never."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    cached: int | None = None
    experts: tuple[Experts, ...] = ()

    def add(self, part: _Part) -> None:
        """Append a part; its spans count from its own first token."""
        answer = part.answer
        if part.experts is not None:
            self.experts += (part.experts,)
        meta, offset = answer.meta_info, len(self.tokens)
        if self.cached is None:
            self.cached = meta.cached_tokens
        self.tokens += answer.output_ids
        self.logprobs += tuple([one.value for one in meta.output_token_logprobs])
        count = len(answer.output_ids)
        whole = [_Span(version=meta.weight_version, start=0, end=count)]
        for span in meta.weight_versions or whole:
            end = min(span.end, count)  # SGLang's last one may end at the wanted length
            if span.start < end:
                self._span(int(span.version), span.start + offset, end + offset)

    def _span(self, version: int, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            start, self.spans = self.spans[-1].start, self.spans[:-1]
        self.spans += (VersionSpan(version=version, start=start, end=end),)

    @property
    def positions(self) -> int:
        """As many as experts are known of."""
        return sum(map(len, self.experts))

    def generation(self, finish: Finish, url: str) -> Generation:
        return Generation(
            token_ids=self.tokens,
            logprobs=self.logprobs,
            versions=self.spans,
            finish=finish,
            cached_tokens=self.cached or 0,
            engine=url,
            experts=np.concatenate(self.experts) if self.experts else None,
        )


class EngineClient:
    """Speaks to the engines that `urls()` lists, over connections that are kept.

    weights: a name of the weights that the engines of `urls()` proved; an engine's prefix cache is
    asked for under that name only, so that no reply builds on keys and values of other weights.
    experts: those of the model; engines are then asked which of them each position took, once for
    each position of a trajectory. None: not asked.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        config: EngineConfig,
        events: Writer | None = None,
        *,
        weights: Callable[[], str] | None = None,
        experts: ModelExperts | None = None,
    ) -> None:
        self._router = Router(urls)
        self._urls = urls
        self._config = config
        self._events = events or NoEvents()
        self._weights = weights
        self._experts = experts
        self._wire = Wire(timeout_s=config.request_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._wire.__aexit__(kind, error, trace)

    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        """Sample a reply; an aborted part is continued from its tokens, wherever an engine is.

        Raises RequestRefused for what no engine can answer, EngineLost when `retries` are spent,
        when nothing was routable for twice start_timeout_s, or after request_timeout_s.
        """
        room = self._config.context_length - len(input_ids)
        if room < 1:
            raise RequestRefused(
                f"prompt of {len(input_ids)} tokens in {trajectory}: engine.context_length="
                f"{self._config.context_length} leaves no room for a reply; "
                "shorten it or raise that"
            )
        budget = min(sampling.max_new_tokens, room)
        reply, fruitless = _Reply(), 0
        while True:
            before = len(reply.tokens)
            ids = [*input_ids, *reply.tokens] if before else input_ids
            wanted = replace(
                sampling,
                max_new_tokens=budget - before,
                experts_from=sampling.experts_from + reply.positions,
            )
            url, part = await self._send(ids, wanted, trajectory)
            reply.add(part)
            kind = part.answer.meta_info.finish_reason.type
            if kind != "abort":
                return reply.generation(kind, url)
            if len(reply.tokens) >= budget:
                return reply.generation("length", url)
            if len(reply.tokens) > before:
                fruitless = 0
                continue
            fruitless += 1
            if fruitless > MAX_FRUITLESS_ABORTS:
                raise EngineLost(
                    f"{trajectory}: {url} aborted the request {fruitless} times in a row without a "
                    "token; see the engine's log"
                )
            await asyncio.sleep(POLL_S)  # for what aborts it, as a pause, to be known here

    async def _send(self, ids: list[int], sampling: Sampling, trajectory: str) -> tuple[str, _Part]:
        """Post one request until an engine answers it; return which did."""
        avoid: set[str] = set()
        causes: list[str] = []
        for attempt in range(self._config.retries + 1):
            url = await self._wait_for_engine(trajectory, avoid)
            self._router.begin(url)
            try:
                return url, await self._post(url, ids, sampling)
            except (ConnectionError, _Busy, _Garbled) as error:
                causes.append(f"{url}: {type(error).__name__}: {error}")
                self._tell(url, causes[-1], attempt + 1)
                avoid.add(url)
            except TimeoutError as error:
                raise EngineLost(
                    f"{trajectory}: no answer from {url} within engine.request_timeout_s="
                    f"{self._config.request_timeout_s}; raise it or see the engine's log"
                ) from error
            finally:
                self._router.end(url)
            if attempt < self._config.retries and not self._has_other(avoid):
                avoid.clear()
                await asyncio.sleep(_backoff(attempt))
        raise EngineLost(
            f"{trajectory}: {len(causes)} sends failed (engine.retries={self._config.retries}), "
            f"the last by {causes[-1]}; see the engines' logs"
        )

    async def _post(self, url: str, ids: list[int], sampling: Sampling) -> _Part:
        status, body = await self._wire.post(url, "/generate", self._payload(ids, sampling))
        if status == 503:
            raise _Busy(body.decode(errors="replace")[:200])
        if status in ABORTED and b"was aborted" in body:
            meta = _Meta(finish_reason=_Finish(type="abort"))
            return _Part(_Answer(meta_info=meta, output_ids=()))
        if status != 200:
            raise RequestRefused(
                f"{url} answered {status} to /generate: {body.decode(errors='replace')[:500]}"
            )
        try:
            answer = _ANSWERS.decode(body)
        except msgspec.MsgspecError as error:
            raise _Garbled(f"{error}: {body[:200].decode(errors='replace')}") from error
        tokens, logprobs = len(answer.output_ids), len(answer.meta_info.output_token_logprobs)
        if tokens != logprobs:
            raise _Garbled(f"{tokens} tokens and {logprobs} log-probabilities")
        rows = len(ids) + tokens - 1 - sampling.experts_from
        return _Part(answer, self._experts_of(answer.meta_info, rows))

    def _experts_of(self, meta: _Meta, rows: int) -> Experts | None:
        if self._experts is None:
            return None
        if meta.routed_experts is None:
            # a request aborted while it waited has none: the next part is asked for them
            if meta.finish_reason.type == "abort":
                return None
            raise _Garbled("no routed experts; its server lacks --enable-return-routed-experts")
        try:
            return self._experts.decode(meta.routed_experts, rows)
        except ValueError as error:
            raise _Garbled(str(error)) from error

    def _payload(self, ids: list[int], sampling: Sampling) -> bytes:
        request = _Request(
            input_ids=ids,
            sampling_params=_Params(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=sampling.stop_token_ids,
                sampling_seed=sampling.seed,
            ),
            rid=f"{os.urandom(16).hex()}-",  # aborts match by prefix; the dash ends it
            return_logprob=True,
            logprob_start_len=-1,
            extra_key=None if self._weights is None else self._weights(),
            return_routed_experts=self._experts is not None,
            routed_experts_start_len=sampling.experts_from if self._experts else 0,
        )
        return msgspec.json.encode(request)

    async def _wait_for_engine(self, trajectory: str, avoid: set[str]) -> str:
        deadline = time.monotonic() + STARTS * self._config.start_timeout_s
        wait = POLL_S
        while (url := self._router.pick(trajectory, avoid=avoid)) is None:
            if time.monotonic() > deadline:
                raise EngineLost(
                    f"{trajectory}: no engine was routable for {STARTS} times engine."
                    f"start_timeout_s={self._config.start_timeout_s}; see the engines' logs"
                )
            await asyncio.sleep(wait * (0.5 + random.random()))
            wait = min(wait * 2, MAX_BACKOFF_S)
        return url

    def _has_other(self, avoid: set[str]) -> bool:
        return any(url not in avoid for url in self._urls())

    def _tell(self, url: str, detail: str, tries: int) -> None:
        at = now()
        self._events.write(
            EngineFault(
                start=at, end=at, engine=url, cause="request", detail=detail, restarts=tries
            )
        )


class _Busy(Exception):
    """The engine answered 503."""


class _Garbled(Exception):
    """The engine answered 200 with what is no reply: no numbers, or not one a token."""


def _backoff(attempt: int) -> float:
    """Seconds before the next send: doubling, with jitter from half to one and a half."""
    bounded: float = min(FIRST_BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
    return bounded * (0.5 + random.random())
