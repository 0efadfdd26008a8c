"""A headless Chromium, spoken to over its DevTools socket: what a page looks like to a person."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S, CALL_S, LOOK_S = 120.0, 240.0, 0.05
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
"""The last one: a page that asks for anything from a network fails, and that is an error."""


def find() -> str | None:
    """Return the browser's path, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; collects what it complains about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids, self._session = socket, count(1), ""
        self.complaints: list[str] = []

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        found = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result. Raises RuntimeError with the browser's words."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(CALL_S):
            while True:
                answer = await self._socket.receive_json()
                if answer.get("id") == number:
                    break
                self._hear(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def open(self, path: Path, *, width: int, scheme: str = "light") -> None:
        """Show a file at a width, in a colour scheme, until it has loaded."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        url = path.resolve().as_uri()
        await self.call("Page.navigate", url=url)
        await self._loaded(url)

    async def _loaded(self, url: str) -> None:
        """Wait until `url` is there; a load event may be that of the page before."""
        ends = time.monotonic() + CALL_S
        while await self.ask("document.readyState + ' ' + location.href") != f"complete {url}":
            if time.monotonic() > ends:
                raise TimeoutError(f"{url} was not loaded in {CALL_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    async def pdf(self, path: Path) -> None:
        """Write what a printer would get."""
        found = await self.call("Page.printToPDF", printBackground=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{params['type']}")
        elif method in ("Runtime.exceptionThrown", "Network.loadingFailed"):
            self.complaints.append(method)
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"asked for {url}")


@asynccontextmanager
async def page(browser: str, profile: Path) -> AsyncIterator[Page]:
    """Start the browser for one tab; it is gone when the block ends."""
    process = await asyncio.create_subprocess_exec(
        browser, *FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        address = await asyncio.wait_for(_address(process), START_S)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0) as socket,
        ):
            tab = Page(socket)
            await tab.attach()
            yield tab
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr
    said = b""
    async for line in process.stderr:
        said += line
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found[1].decode()
    raise RuntimeError(f"chromium ended: {said.decode(errors='replace')[-500:]}")
