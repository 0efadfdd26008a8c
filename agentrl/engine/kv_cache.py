"""Keys and values of all sequences that one embedded engine holds, and what each row is good for.

Rows 0 … running−1 are what the next decode step reads, as one contiguous view. Rows from
`max_running` on keep what finished, oldest overwritten first. Both serve as prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

NO_REUSE = -1
"""Tag of a row whose keys come from more than one version."""


class RowCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A `Cache` that writes each row of a batch at positions of its own.

    Before every forward, `aim` names the rows and positions; column `context` takes what
    padding writes. Per layer one tensor [rows, 2 · kv_heads, context + 1, head_dim], keys before
    values, made at first use. With the columns inside the heads, attention reads in order.
    """

    def __init__(self, *, rows: int, context: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.context = context
        self.pairs: list[torch.Tensor] = []
        self._rows = slice(0, 0)
        self._length = 0
        self._positions = torch.empty(0, dtype=torch.long)
        self._flat: torch.Tensor | None = None

    def aim(self, first: int, positions: torch.Tensor, length: int) -> None:
        """Point the next forward at rows [first, first + n).

        positions: [n, T], the column that each new key takes; length: columns that are attended.
        """
        self._rows, self._length = slice(first, first + positions.shape[0]), length
        self._positions, self._flat = positions, None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [n, kv_heads, T, head_dim] in place; return the rows up to `length`."""
        fresh = torch.cat((key_states, value_states), dim=1)
        return self.write(
            fresh.transpose(1, 2).reshape(-1, fresh.shape[3]), fresh.shape[1], layer_idx
        )

    def write(
        self, fresh: torch.Tensor, heads: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [n · T · heads, head_dim], each column's keys before its values.

        heads: 2 · kv_heads. Returns keys and values [n, kv_heads, length, head_dim].
        """
        while len(self.pairs) <= layer:
            self.pairs.append(self._make(heads, fresh))
        pairs = self.pairs[layer]
        if self._flat is None:
            self._flat = self._targets(heads)
        pairs.view(-1, fresh.shape[1]).index_copy_(0, self._flat, fresh)
        seen = pairs[self._rows, :, : self._length]
        return seen[:, : heads // 2], seen[:, heads // 2 :]

    def copy_row(self, source: int, target: int, start: int, end: int) -> None:
        """Copy columns [start, end) of one row to another."""
        if start >= end:
            return
        for pairs in self.pairs:
            pairs[target, :, start:end] = pairs[source, :, start:end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def _targets(self, heads: int) -> torch.Tensor:
        """Return where each (row, column, head) of `write` goes, in rows of head_dim."""
        rows = torch.arange(self._rows.start, self._rows.stop)[:, None, None]
        every = (rows * heads + torch.arange(heads)) * (self.context + 1)
        return (every + self._positions[:, :, None]).reshape(-1)

    def _make(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        shape = (self.rows, heads, self.context + 1, like.shape[1])
        return torch.zeros(shape, dtype=like.dtype)  # zeros: pages stay untouched until written


@dataclass(slots=True)
class RowTable:
    """What each row of the cache holds. All arrays are indexed by row."""

    running_rows: int
    kept_rows: int
    context: int
    tokens: NDArray[np.int64] = field(init=False)
    """[rows, context + 1]: the known tokens; the newest of a running row has no keys yet."""
    logprobs: NDArray[np.float32] = field(init=False)
    length: NDArray[np.int64] = field(init=False)
    """Columns whose keys and values are written."""
    tag: NDArray[np.int64] = field(init=False)
    """(version, extra_key), as a small number; only equal tags share prefixes."""
    used: NDArray[np.int64] = field(init=False)
    clock: int = 0

    def __post_init__(self) -> None:
        rows = self.running_rows + self.kept_rows
        self.tokens = np.zeros((rows, self.context + 1), dtype=np.int64)
        self.logprobs = np.zeros((rows, self.context + 1), dtype=np.float32)
        self.length = np.zeros(rows, dtype=np.int64)
        self.tag = np.full(rows, NO_REUSE, dtype=np.int64)
        self.used = np.zeros(rows, dtype=np.int64)

    def shared(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for every row how many of its keyed tokens are a prefix of `ids`. [rows]"""
        differs = self.tokens[:, : len(ids)] != ids
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
        return np.minimum(first, self.length)

    def touch(self, row: int) -> None:
        self.clock += 1
        self.used[row] = self.clock

    def copy(self, source: int, target: int) -> None:
        """Copy all that is known of one row to another (not its keys)."""
        self.tokens[target] = self.tokens[source]
        self.logprobs[target] = self.logprobs[source]
        self.length[target] = self.length[source]
        self.tag[target] = self.tag[source]
        self.used[target] = self.used[source]

    def place_to_keep(self, row: int) -> tuple[int, int]:
        """Return (kept row, columns already equal there) for what running row `row` holds.

        A kept row that is a prefix of it is replaced; else the one unused the longest.
        """
        first = self.running_rows
        ids = self.tokens[row, : self.length[row]]
        same = (self.tag[first:] == self.tag[row]) & (self.length[first:] > 0)
        shared = self.shared(ids)[first:]
        covered = np.where(same & (shared == self.length[first:]), shared, 0)
        if covered.any():
            best = int(covered.argmax())
            return first + best, int(covered[best])
        return first + int(self.used[first:].argmin()), 0

    def forget_kept(self) -> None:
        """Drop every kept row."""
        self.tag[self.running_rows :] = NO_REUSE
        self.length[self.running_rows :] = 0
        self.used[self.running_rows :] = 0
