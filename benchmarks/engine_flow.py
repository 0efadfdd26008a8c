"""Trajectories of several turns that ask an engine for replies, and the rates that come of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.engine.base import Sampling
from agentrl.engine.client import EngineClient


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round: `count` trajectories at once."""

    count: int
    turns: int
    prompt: int
    new: int
    vocabulary: int

    async def run(self, client: EngineClient, seed: int) -> dict[str, float]:
        """Return its seconds, tokens, and this process's CPU seconds a request."""
        given = [self.prompts(seed, at) for at in range(self.count)]
        began, cpu = time.perf_counter(), time.process_time()
        replies = await asyncio.gather(
            *(self._one(client, f"{seed}-{at}", one) for at, one in enumerate(given))
        )
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return {
            "seconds": seconds,
            "tokens": sum(replies),
            "tokens_per_s": sum(replies) / seconds,
            "client_cpu_ms_per_request": 1000 * cpu / (self.count * self.turns),
        }

    def prompts(self, seed: int, at: int) -> list[list[int]]:
        """The first prompt, and what each later turn adds."""
        rng = np.random.default_rng([seed, at])
        sizes = [self.prompt, *[64] * (self.turns - 1)]
        return [rng.integers(16, self.vocabulary, size).tolist() for size in sizes]

    async def _one(self, client: EngineClient, name: str, given: list[list[int]]) -> int:
        ids, made = list[int](), 0
        sampling = Sampling(max_new_tokens=self.new, temperature=1.0)
        for more in given:
            ids += more
            reply = await client.generate(ids, sampling, trajectory=name)
            made += len(reply.token_ids)
            ids += reply.token_ids
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    start: float
    end: float
    cpu_s: float
    """Of this process."""
    is_watched: bool


@dataclass(frozen=True, slots=True)
class Reply:
    start: float
    end: float
    tokens: int

    def within(self, window: Window) -> float:
        """Return how many of its tokens were made in the window, if all took as long."""
        shared = min(self.end, window.end) - max(self.start, window.start)
        return self.tokens * max(0.0, shared) / (self.end - self.start)


class Flow:
    """Trajectories without an end, each agent's one after another."""

    def __init__(self, shape: Round, client: EngineClient) -> None:
        self._shape, self._client = shape, client
        self.replies: list[Reply] = []
        self._began: dict[int, float] = {}
        """When each agent sent what it waits for."""

    async def agent(self, number: int) -> None:
        shape = self._shape
        sampling = Sampling(max_new_tokens=shape.new, temperature=1.0)
        for turn in itertools.count():
            if turn % shape.turns == 0:
                name, ids = f"{number}-{turn}", list[int]()
                given = iter(shape.prompts(turn, number))
            ids += next(given)
            self._began[number] = began = time.perf_counter()
            reply = await self._client.generate(ids, sampling, trajectory=name)
            self.replies.append(Reply(began, time.perf_counter(), len(reply.token_ids)))
            ids += reply.token_ids

    def is_past(self, moment: float) -> bool:
        """Return whether all that was sent before it is answered."""
        return all(began > moment for began in self._began.values())


def compared(windows: list[Window], replies: list[Reply]) -> dict[str, Any]:
    """Return the rates of the windows, and the ratios of pairs: a watched one, one that is not."""
    rates = [sum(reply.within(one) for reply in replies) / (one.end - one.start) for one in windows]
    ratios = [
        rates[at] / rates[at + 1] if windows[at].is_watched else rates[at + 1] / rates[at]
        for at in range(0, len(windows), 2)
    ]
    ended = sum(windows[0].start < one.end <= windows[-1].end for one in replies)
    lower, median, upper = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return {
        "tokens_per_s": {
            name: [
                round(rate)
                for rate, one in zip(rates, windows, strict=True)
                if one.is_watched == wanted
            ]
            for name, wanted in (("watched", True), ("unwatched", False))
        },
        "ratio": {"median": median, "quartiles": [lower, upper], "pairs": len(ratios)},
        "client_cpu_ms_per_request": 1000 * sum(one.cpu_s for one in windows) / ended,
    }
