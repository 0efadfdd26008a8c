"""The running batch: rows of the cache, joined by prefill and stepped by decode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engine.kv_cache import NO_REUSE, RowCache, RowTable
from agentrl.engine.loaded import LoadedModel
from agentrl.engine.requests import Request
from agentrl.engine.sampling import sample, uniforms

ROUND = 16
"""Attended columns are rounded up to this."""
DEFER_GAIN = 16
"""Tokens that a request must save to wait for another's prefill."""


Ended = tuple[Request, dict[str, object]]
"""A request and its finish_reason."""


@dataclass(slots=True)
class Settings:
    """Sampling settings of the running rows, indexed by row."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    seed: NDArray[np.uint64]

    @classmethod
    def empty(cls, rows: int) -> Settings:
        return cls(
            temperature=np.ones(rows, dtype=np.float32),
            top_p=np.ones(rows, dtype=np.float32),
            top_k=np.zeros(rows, dtype=np.int64),
            seed=np.zeros(rows, dtype=np.uint64),
        )

    def set(self, row: int, request: Request) -> None:
        params = request.params
        self.temperature[row], self.top_p[row] = params.temperature, params.top_p
        self.top_k[row], self.seed[row] = max(params.top_k, 0), request.seed

    def move(self, source: int, target: int) -> None:
        for array in (self.temperature, self.top_p, self.top_k, self.seed):
            array[target] = array[source]


@dataclass(slots=True)
class Batch:
    """Running requests in rows 0 … n−1, finished ones kept as prefixes behind them."""

    model: LoadedModel
    max_running: int
    kept: int
    context: int
    prefill_tokens: int
    requests: list[Request] = field(default_factory=list)
    """Of row i at index i."""
    table: RowTable = field(init=False)
    cache: RowCache = field(init=False)
    settings: Settings = field(init=False)
    _tags: dict[tuple[str, str], int] = field(default_factory=dict)
    _columns: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = self.max_running + self.kept
        self.table = RowTable(self.max_running, self.kept, self.context)
        self.cache = RowCache(rows=rows, context=self.context)
        self.settings = Settings.empty(self.max_running)
        self._columns = torch.arange(self.context + 1)

    def __len__(self) -> int:
        return len(self.requests)

    def tag(self, extra_key: str) -> int:
        """Return the number that stands for this version of the weights and `extra_key`."""
        return self._tags.setdefault((self.model.version, extra_key), len(self._tags))

    def join(self, waiting: list[Request]) -> tuple[list[Request], list[Ended]]:
        """Prefill the first of `waiting` that fit and sample their first tokens.

        Returns those still waiting, and those that ended at once. A request that shares more with
        another of the same pass than with any written row is left for the next pass, where it
        copies those keys instead of computing them.
        """
        first, longest = len(self), 0
        starts: list[int] = []
        rest: list[Request] = []
        for index, request in enumerate(waiting):
            row = len(self)
            if row == self.max_running or longest * (row - first + 1) > self.prefill_tokens:
                rest += waiting[index:]
                break
            start = self._place(row, request, first)
            if start < 0:
                rest.append(request)
                continue
            starts.append(start)
            longest = max(longest, len(request.tokens) - start)
        return rest, self._prefill(first, starts) if starts else []

    def step(self) -> list[Ended]:
        """Sample one more token of every row; return what ended."""
        n = len(self)
        at = self.table.length[:n, None].copy()
        logits = self._forward(0, self.table.tokens[np.arange(n)[:, None], at], at, at)
        self.table.length[:n] += 1
        return self._take(0, logits)

    def remove(self, row: int) -> Request:
        """Take a row out, its tokens saved in the request and its keys kept as a prefix."""
        request = self.requests[row]
        self._save(row, request)
        if self.table.tag[row] != NO_REUSE and self.kept:
            target, same = self.table.place_to_keep(row)
            self.cache.copy_row(row, target, same, int(self.table.length[row]))
            self.table.copy(row, target)
            self.table.touch(target)
        self._drop(row)
        return request

    def relabel(self) -> None:
        """Note that the weights changed under running rows: their keys are of two versions."""
        self.table.tag[: len(self)] = NO_REUSE
        for row, request in enumerate(self.requests):
            request.mark(self.model.version, self._sampled(row, request))

    def flush(self) -> None:
        self.table.forget_kept()

    def used_tokens(self) -> int:
        return int(self.table.length.sum())

    def _place(self, row: int, request: Request, first: int) -> int:
        """Put `request` into `row`; return the columns that need no computing, or -1 to defer."""
        ids, tag = request.tokens, self.tag(request.extra_key)
        usable = np.where(self.table.tag == tag, self.table.shared(ids), 0)
        pending = int(usable[first:row].max(initial=0))
        usable[first : self.max_running] = 0
        source = int(usable.argmax())
        start = min(int(usable[source]), len(ids) - 1)
        if min(pending, len(ids) - 1) >= start + DEFER_GAIN:
            return -1
        self.cache.copy_row(source, row, 0, start)
        self.table.touch(source)
        table = self.table
        table.tokens[row, : len(ids)] = ids
        table.length[row], table.tag[row] = len(ids), tag
        already = len(ids) - len(request.prompt)
        table.logprobs[row, len(request.prompt) : len(ids)] = request.logprobs
        if not already:
            request.cached = start
        request.mark(self.model.version, already)
        self.settings.set(row, request)
        self.requests.append(request)
        return start

    def _prefill(self, first: int, starts: list[int]) -> list[Ended]:
        """Compute the columns that the rows from `first` on lack, right-aligned: [n, T] a call.

        What exceeds `prefill_tokens` is cut into chunks of columns.
        """
        rows = np.arange(first, len(self))
        end, begin = self.table.length[rows], np.array(starts, dtype=np.int64)
        width = int((end - begin).max())
        chunk = max(1, self.prefill_tokens // len(rows))
        logits = torch.empty(0)
        for low in range(0, width, chunk):
            offsets = np.arange(low, min(low + chunk, width))
            positions = (end - width)[:, None] + offsets
            target = np.where(positions >= begin[:, None], positions, self.context)
            positions = np.maximum(positions, 0)
            ids = self.table.tokens[rows[:, None], positions]
            logits = self._forward(first, ids, positions, target)
        return self._take(first, logits)

    def _forward(
        self,
        first: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        target: NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the logits of the last column. All [n, T]; for `target` see RowCache.aim."""
        length = min(-(-(int(positions.max()) + 1) // ROUND) * ROUND, self.context)
        self.cache.aim(first, torch.from_numpy(target), length)
        where = torch.from_numpy(positions)
        hidden = self._columns[:length] > where[:, None, :, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self.model.forward(torch.from_numpy(ids), where, mask, self.cache)

    def _take(self, first: int, logits: torch.Tensor) -> list[Ended]:
        """Sample from `logits` for the rows from `first` on; remove and return what ended."""
        rows = np.arange(first, first + len(logits))
        at = self.table.length[rows]
        where = slice(first, first + len(logits))
        chosen, logprobs = sample(
            logits,
            temperature=self.settings.temperature[where],
            top_p=self.settings.top_p[where],
            top_k=self.settings.top_k[where],
            uniform=uniforms(self.settings.seed[where], at),
        )
        self.table.tokens[rows, at] = chosen
        self.table.logprobs[rows, at] = logprobs
        ended = []
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            if reason := self._end_of(row, token):
                ended.append((row, reason))
        return [(self.remove(row), reason) for row, reason in reversed(ended)]

    def _end_of(self, row: int, token: int) -> dict[str, object] | None:
        request = self.requests[row]
        if token in request.stop_ids:
            return {"type": "stop", "matched": token}
        sampled = self._sampled(row, request)
        if sampled >= request.params.max_new_tokens:
            return {"type": "length", "length": sampled}
        return None

    def _sampled(self, row: int, request: Request) -> int:
        return int(self.table.length[row]) + 1 - len(request.prompt)

    def _save(self, row: int, request: Request) -> None:
        known, asked = int(self.table.length[row]) + 1, len(request.prompt)
        request.tokens = self.table.tokens[row, :known].copy()
        request.logprobs = self.table.logprobs[row, asked:known].copy()

    def _drop(self, row: int) -> None:
        last = len(self) - 1
        if row != last:
            self.cache.copy_row(last, row, 0, int(self.table.length[last]))
            self.table.copy(last, row)
            self.settings.move(last, row)
            self.requests[row] = self.requests[last]
        self.requests.pop()
        self.table.tag[last], self.table.length[last] = NO_REUSE, 0
