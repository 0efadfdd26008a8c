"""A server on 127.0.0.1 that answers E2B's SDK: for tests and for `doctor`, never for a run.

Its sandboxes are those of another provider on this host, so paths, processes and files behave as in
a machine of their own. It speaks the part of E2B's control plane and of its daemon (envd) that
`agentrl.sandbox.e2b` uses; output comes in one piece at a command's end, stdout and stderr mixed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import struct
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web

from agentrl.errors import SandboxLost
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxProvider

ENVD_VERSION = "0.6.4"
END_OF_STREAM = 2
"""Flag of Connect's last frame."""
MOST_BYTES = 64 << 20
LONGEST_S = 3600.0


@dataclass(kw_only=True, slots=True)
class Faults:
    """What goes wrong; may be changed while it serves."""

    refuse_creates: int = 0
    """The next so many creates are answered with 429."""
    create_delay_s: float = 0.0
    cut_commands: int = 0
    """The next so many commands lose their connection instead of an answer."""
    lose_creates: int = 0
    """The next so many creates make a sandbox whose answer never arrives."""
    refuse_builds: int = 0
    """The next so many builds of templates are answered with 429."""
    missing_images: frozenset[str] = frozenset()
    """Those of which no template can be built."""
    stall_commands: int = 0
    """The next so many commands are never run, and are ended only by the client's own time."""


@dataclass(kw_only=True, slots=True)
class Machine:
    """One sandbox as the service knows it."""

    id: str
    wish: dict[str, Any]
    sandbox: Sandbox
    ends: datetime
    timer: asyncio.TimerHandle | None = None
    renewals: int = 0

    def describe(self) -> dict[str, Any]:
        return {
            "sandboxID": self.id,
            "templateID": self.wish["templateID"],
            "clientID": "loopback",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": "loopback",
            "domain": None,
            "startedAt": zulu(datetime.now(UTC)),
            "endAt": zulu(self.ends),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 256,
            "state": "running",
            "metadata": self.wish.get("metadata") or {},
        }


@dataclass(kw_only=True)
class Service:
    """The control plane and the daemon inside, on one port."""

    provider: SandboxProvider
    image: Path
    """What every sandbox starts from, whatever template is asked for."""
    faults: Faults = field(default_factory=Faults)
    machines: dict[str, Machine] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Idempotency key → the sandbox that it made."""
    templates: dict[str, str] = field(default_factory=dict)
    """Name of a template that was built → the image it is of."""
    in_flight: int = 0
    peak: int = 0
    """Most commands that were in flight at once."""
    url: str = ""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/{v2:(v2/)?}sandboxes", self.create),
            web.get("/{v2:(v2/)?}sandboxes", self.list),
            web.get("/sandboxes/{id}", self.info),
            web.delete("/sandboxes/{id}", self.kill),
            web.post("/sandboxes/{id}/timeout", self.renew),
            web.post("/v3/templates", self.ask_build),
            web.post("/v2/templates/{id}/builds/{build}", self.build),
            web.get("/templates/{id}/builds/{build}/status", self.built),
            web.get("/health", self.health),
            web.get("/files", self.read),
            web.post("/files", self.write),
            web.post("/process.Process/Start", self.run),
        ]

    async def create(self, request: web.Request) -> web.Response:
        if not request.headers.get("X-API-Key"):
            raise refusal(web.HTTPUnauthorized, "no API key")
        if self.faults.refuse_creates > 0:
            self.faults.refuse_creates -= 1
            raise refusal(web.HTTPTooManyRequests, "rate limit")
        wish = await request.json()
        await asyncio.sleep(self.faults.create_delay_s)
        key = request.headers.get("Idempotency-Key", "")
        if (known := self.machines.get(self.keys.get(key, ""))) is None:
            sandbox = await self.provider.start(self.image, owner="loopback")
            now = datetime.now(UTC)
            known = Machine(id=f"i{uuid.uuid4().hex[:19]}", wish=wish, sandbox=sandbox, ends=now)
            self.machines[known.id] = known
            self.keys[key] = known.id if key else ""
        self.expire(known, wish.get("timeout", 300))
        if self.faults.lose_creates > 0:
            self.faults.lose_creates -= 1
            assert request.transport
            request.transport.abort()
        return web.json_response(known.describe(), status=201)

    async def list(self, request: web.Request) -> web.Response:
        pairs = request.query.get("metadata", "").split("&")
        wanted = dict(pair.split("=", 1) for pair in pairs if pair)
        found = [machine.describe() for machine in self.machines.values()]
        return web.json_response([o for o in found if wanted.items() <= o["metadata"].items()])

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self.named(request).describe())

    async def renew(self, request: web.Request) -> web.Response:
        machine = self.named(request)
        machine.renewals += 1
        self.expire(machine, (await request.json())["timeout"])
        return web.Response(status=204)

    async def kill(self, request: web.Request) -> web.Response:
        await self.end(self.named(request).id)
        return web.Response(status=204)

    async def ask_build(self, request: web.Request) -> web.Response:
        if self.faults.refuse_builds > 0:
            self.faults.refuse_builds -= 1
            raise refusal(web.HTTPTooManyRequests, "rate limit")
        name = (await request.json())["name"]
        found = {"templateID": name, "buildID": "1", "public": False}
        found |= {"names": [name], "tags": [], "aliases": [name]}
        return web.json_response(found, status=202)

    async def build(self, request: web.Request) -> web.Response:
        self.templates[request.match_info["id"]] = (await request.json())["fromImage"]
        return web.Response(status=202)

    async def built(self, request: web.Request) -> web.Response:
        """Say that it is ready, or why its image could not be had."""
        name = request.match_info["id"]
        found: dict[str, Any] = {"templateID": name, "buildID": "1", "logs": [], "logEntries": []}
        if self.templates[name] in self.faults.missing_images:
            reason = {"message": f"image {self.templates[name]} not found"}
            return web.json_response(found | {"status": "error", "reason": reason})
        return web.json_response(found | {"status": "ready"})

    def expire(self, machine: Machine, seconds: float) -> None:
        if machine.timer:
            machine.timer.cancel()
        machine.ends = datetime.now(UTC) + timedelta(seconds=seconds)
        loop = asyncio.get_running_loop()
        machine.timer = loop.call_later(
            seconds, lambda: loop.create_task(self.end(machine.id), name=f"end {machine.id}")
        )

    async def end(self, machine_id: str) -> None:
        """End a sandbox; do nothing if that has happened."""
        machine = self.machines.pop(machine_id, None)
        if machine is not None:
            if machine.timer:
                machine.timer.cancel()
            await machine.sandbox.close()

    def named(self, request: web.Request) -> Machine:
        if (found := self.machines.get(request.match_info["id"])) is None:
            raise refusal(web.HTTPNotFound, "sandbox not found")
        return found

    def addressed(self, request: web.Request) -> Machine:
        """Return the sandbox whose daemon the SDK speaks to, by its header."""
        if (found := self.machines.get(request.headers.get("E2b-Sandbox-Id", ""))) is None:
            raise refusal(web.HTTPBadGateway, "The sandbox was not found")
        return found

    async def health(self, request: web.Request) -> web.Response:
        self.addressed(request)
        return web.Response(status=204)

    async def read(self, request: web.Request) -> web.Response:
        path = request.query["path"]
        try:
            data = await self.addressed(request).sandbox.get(path, max_bytes=MOST_BYTES)
        except FileNotFoundError as error:
            raise refusal(web.HTTPNotFound, f"path '{path}' does not exist") from error
        return web.Response(body=data)

    async def write(self, request: web.Request) -> web.Response:
        path, sandbox = request.query.get("path", ""), self.addressed(request).sandbox
        await sandbox.put(path, await uploaded(request))
        return web.json_response([{"name": Path(path).name, "type": "file", "path": path}])

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Run a command; answer in Connect's frames at its end."""
        machine = self.addressed(request)
        wish = json.loads((await request.read())[5:])["process"]
        limit_s = int(request.headers.get("Connect-Timeout-Ms", 0)) / 1000 or LONGEST_S
        reply = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await reply.prepare(request)
        await reply.write(frame({"event": {"start": {"pid": 1}}}))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            done = await self.play(machine, wish, limit_s)
        except SandboxLost:  # it died under the command: no word of goodbye
            done = None
        finally:
            self.in_flight -= 1
        if done is None:
            if request.transport:
                request.transport.abort()
            return reply
        for message, flag in answer(done):
            await reply.write(frame(message, flag))
        return reply

    async def play(
        self, machine: Machine, wish: dict[str, Any], limit_s: float
    ) -> ExecResult | None:
        if self.faults.cut_commands > 0:
            self.faults.cut_commands -= 1
            return None
        if self.faults.stall_commands > 0:
            self.faults.stall_commands -= 1
            return await machine.sandbox.exec("sleep 3600", timeout_s=limit_s)
        words = shlex.join([wish["cmd"], *wish.get("args", [])])
        where = shlex.quote(wish.get("cwd") or "/")
        env = {**(machine.wish.get("envVars") or {}), **(wish.get("envs") or {})}
        return await machine.sandbox.exec(
            f"cd {where} && exec {words}", timeout_s=limit_s, max_bytes=MOST_BYTES, env=env
        )


async def uploaded(request: web.Request) -> bytes:
    """Return the content of the one file that the SDK sends, in a form or as it is."""
    if not request.content_type.startswith("multipart/"):
        return await request.read()
    part = await (await request.multipart()).next()
    assert isinstance(part, BodyPartReader)
    return bytes(await part.read(decode=True))


def answer(done: ExecResult) -> list[tuple[dict[str, Any], int]]:
    """Return a command's end as Connect's messages, each with its flag."""
    if done.timed_out:
        error = {"code": "deadline_exceeded", "message": "the command ran out of time"}
        return [({"error": error}, END_OF_STREAM)]
    data = base64.b64encode(done.output.encode()).decode()
    end = {"exited": True, "status": f"exit status {done.exit_code}", "exitCode": done.exit_code}
    return [
        ({"event": {"data": {"stdout": data}}}, 0),
        ({"event": {"end": end}}, 0),
        ({}, END_OF_STREAM),
    ]


def frame(message: dict[str, Any], flag: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flag, len(data)) + data


def refusal(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    text = json.dumps({"code": kind.status_code, "message": message})
    return kind(text=text, content_type="application/json")


def zulu(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


@asynccontextmanager
async def serve(provider: SandboxProvider, image: Path) -> AsyncIterator[Service]:
    """Serve sandboxes of `provider` over `image` for the length of the block."""
    service = Service(provider=provider, image=image)
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(service.routes())
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield service
    finally:
        await runner.cleanup()
        for machine_id in list(service.machines):
            await service.end(machine_id)
