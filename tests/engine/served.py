"""A small engine for tests: one handler behind /generate on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Yield the address where `handle` answers."""
    app = web.Application()
    app.router.add_post("/generate", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # some handlers never answer
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
