"""The infinite, seeded stream of tasks, its shards, and sets of its positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def task_of(draw: int, tasks: int, seed: int) -> int:
    """Return the index of the task that `draw` stands for.

    Draws [e × tasks, (e + 1) × tasks) are epoch e: a permutation of all tasks, by (seed, e) alone.
    Raises ValueError without tasks or for a negative draw.
    """
    if tasks < 1 or draw < 0:
        raise ValueError(f"draw={draw} of {tasks} tasks: needs a draw from 0 and 1 task or more")
    epoch, position = divmod(draw, tasks)
    return int(_permutation(epoch, tasks, seed)[position])


def shard(*, node: int, nodes: int, worker: int, workers: int) -> Iterator[int]:
    """Yield, without end, the draws of one worker: i ≡ node (mod nodes), dealt to its workers."""
    if not (0 <= node < nodes and 0 <= worker < workers):
        raise ValueError(
            f"node={node} of {nodes}, worker={worker} of {workers}: indices start at 0 and "
            f"must be below their count"
        )
    return count(node + nodes * worker, nodes * workers)


def may_start(draw: int, consumed: DrawSet, *, groups_per_step: int, max_staleness: int) -> bool:
    """Say whether `draw` keeps started − consumed within groups_per_step × (1 + max_staleness).

    Draws start in order, so all below `draw` count as started, whichever node has them. The bound
    thus holds for the whole run though no node asks another, and `consumed` being old only delays.
    """
    ahead = draw - consumed.below(draw)
    return ahead < groups_per_step * (1 + max_staleness)


class DrawSet:
    """A set of draws kept as ranges: a run consumes nearly in order, so they stay few."""

    def __init__(self, draws: Iterable[int] = ()) -> None:
        self._ranges: list[list[int]] = []  # sorted, disjoint, never touching: [first, last]
        self._count = 0
        for draw in draws:
            self.add(draw)

    @property
    def count(self) -> int:
        return self._count

    def __len__(self) -> int:
        return self._count

    def add(self, draw: int) -> None:
        """Put `draw` in; one that is in already changes nothing."""
        if draw < 0:
            raise ValueError(f"draw={draw}: draws are counted from 0")
        after = self._after(draw)
        if after and draw <= self._ranges[after - 1][1]:
            return
        self._count += 1
        joins_left = after > 0 and self._ranges[after - 1][1] == draw - 1
        joins_right = after < len(self._ranges) and self._ranges[after][0] == draw + 1
        if joins_left and joins_right:
            self._ranges[after - 1][1] = self._ranges.pop(after)[1]
        elif joins_left:
            self._ranges[after - 1][1] = draw
        elif joins_right:
            self._ranges[after][0] = draw
        else:
            self._ranges.insert(after, [draw, draw])

    def __contains__(self, draw: object) -> bool:
        if not isinstance(draw, int):
            return False
        after = self._after(draw)
        return after > 0 and draw <= self._ranges[after - 1][1]

    def __iter__(self) -> Iterator[int]:
        return (draw for first, last in self._ranges for draw in range(first, last + 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrawSet) and self._ranges == other._ranges

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DrawSet.from_ranges({self._ranges})"

    @property
    def highest(self) -> int:
        """The highest draw in it; -1 when it is empty."""
        return self._ranges[-1][1] if self._ranges else -1

    def below(self, draw: int) -> int:
        """Return how many of its draws are lower than `draw`."""
        return sum(min(last, draw - 1) - first + 1 for first, last in self._ranges if first < draw)

    def to_ranges(self) -> list[list[int]]:
        """Return [[first, last], …], both inclusive, in order: what checkpoints and JSON hold."""
        return [list(span) for span in self._ranges]

    @classmethod
    def from_ranges(cls, ranges: Iterable[Sequence[int]]) -> DrawSet:
        """Read what `to_ranges` wrote. Raises ValueError when they overlap or run back."""
        made = cls()
        for first, last in ranges:
            if first < 0 or last < first or first <= made.highest:
                raise ValueError(f"range [{first}, {last}] after {made._ranges}: not in order")
            if made._ranges and made.highest == first - 1:
                made._ranges[-1][1] = last
            else:
                made._ranges.append([first, last])
            made._count += last - first + 1
        return made

    def _after(self, draw: int) -> int:
        """Return how many ranges begin at `draw` or before it."""
        return bisect_right(self._ranges, draw, key=lambda span: span[0])


@lru_cache(maxsize=4)
def _permutation(epoch: int, tasks: int, seed: int) -> NDArray[np.int64]:
    import numpy as np  # most who ask for a set of draws deal none

    return np.random.default_rng([seed, epoch]).permutation(tasks)
