"""One making of each thing in a process, however many wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
AT_ONCE = 4
"""Things made at the same time: what takes minutes must not hold the threads that starts need."""


class SingleFlight(Generic[T]):
    """Keeps what was made by its key; what failed is tried again by the next who asks."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="single-flight")

    async def get(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make`, called in a thread, returned or returns for `key`."""
        future = self._futures.get(key)
        if future is None or (future.done() and (future.cancelled() or future.exception())):
            loop = asyncio.get_running_loop()
            future = self._futures[key] = loop.run_in_executor(self._threads, make)
        return await asyncio.shield(future)

    def made(self, key: str) -> T | None:
        """Return what is there already."""
        future = self._futures.get(key)
        is_there = future is not None and future.done() and not future.cancelled()
        return future.result() if future and is_there and not future.exception() else None
