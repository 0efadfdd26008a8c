"""One making of each thing in a process, however many wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Keeps what was made by its key; what failed is tried again by the next who asks."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}

    async def get(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make`, called in a thread, returned or returns for `key`."""
        future = self._futures.get(key)
        if future is None or (future.done() and (future.cancelled() or future.exception())):
            future = self._futures[key] = asyncio.ensure_future(asyncio.to_thread(make))
        return await asyncio.shield(future)

    def made(self, key: str) -> T | None:
        """Return what is there already."""
        future = self._futures.get(key)
        is_there = future is not None and future.done() and not future.cancelled()
        return future.result() if future and is_there and not future.exception() else None
