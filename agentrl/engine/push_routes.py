"""Weights over a process group, in SGLang's words: join, begin, one request a bucket, end.

Nothing changes before the end: an exchange that was broken off leaves the weights as they were.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from aiohttp import web

from agentrl.engine.scheduler import Scheduler
from agentrl.weights import group as groups
from agentrl.weights.pusher import room_for

log = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""Longest that joining, or one bucket, may take."""


class InitBody(msgspec.Struct, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"


class DestroyBody(msgspec.Struct, kw_only=True):
    group_name: str


class BucketBody(msgspec.Struct, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    weight_version: str | None = None
    flush_cache: bool = True
    load_format: str = ""


@dataclass(slots=True)
class PushRoutes:
    """Joins groups and receives on threads of their own, for both wait for others."""

    scheduler: Scheduler
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _received: dict[str, torch.Tensor] | None = None
    """Since /begin_weight_update; None outside of an update."""
    _version: str | None = None
    _is_flushing: bool = True

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weights_update_group", self.init),
            web.post("/destroy_weights_update_group", self.destroy),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_distributed", self.bucket),
            web.post("/end_weight_update", self.end),
        ]

    async def init(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=InitBody)
        if body.group_name in self._groups:
            return _answer(f"group {body.group_name} is joined already", is_done=False)

        def join() -> None:
            store = groups.visit(body.master_address, body.master_port, body.world_size, TIMEOUT_S)
            self._groups[body.group_name] = groups.join(
                store,
                body.group_name,
                rank=body.rank_offset,
                size=body.world_size,
                backend=body.backend,
                timeout_s=TIMEOUT_S,
            )

        return await _tried(join, f"Joined group {body.group_name}.")

    async def destroy(self, http: web.Request) -> web.Response:
        name = msgspec.json.decode(await http.read(), type=DestroyBody).group_name
        if (group := self._groups.pop(name, None)) is None:
            return _answer(f"no group {name} was joined", is_done=False)
        await asyncio.to_thread(groups.leave, group)
        return _answer(f"Left group {name}.")

    async def begin(self, http: web.Request) -> web.Response:
        del http
        self._received, self._version = {}, None
        return _answer("Ready for weights.")

    async def bucket(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=BucketBody)
        received, group = self._received, self._groups.get(body.group_name)
        if received is None or group is None:
            missing = "update was begun" if received is None else f"group {body.group_name}"
            return _answer(f"no {missing}", is_done=False)

        if body.load_format != "flattened_bucket":
            wanted = "load_format is 'flattened_bucket' here"
            return _answer(f"{wanted}, not {body.load_format!r}", is_done=False)

        def receive() -> None:
            flat, parts = room_for(body.dtypes, body.shapes)
            dist.broadcast(flat, 0, group=group)
            received.update(zip(body.names, parts, strict=True))

        self._version, self._is_flushing = body.weight_version, body.flush_cache
        return await _tried(receive, f"Received {len(body.names)} tensors.")

    async def end(self, http: web.Request) -> web.Response:
        del http
        received, self._received = self._received, None
        if received is None:
            return _answer("no update was begun", is_done=False)
        done, message = await asyncio.wrap_future(
            self.scheduler.exchange(received, self._version, is_flushing=self._is_flushing)
        )
        return _answer(message, is_done=done)


async def _tried(work: Callable[[], None], said: str) -> web.Response:
    try:
        await asyncio.to_thread(work)
    except (RuntimeError, AttributeError, ValueError) as error:  # the group's; an odd dtype
        log.warning("weights over a group: %s", error)
        return _answer(str(error), is_done=False)
    return _answer(said)


def _answer(message: str, *, is_done: bool = True) -> web.Response:
    body = msgspec.json.encode({"success": is_done, "message": message})
    return web.Response(body=body, status=200 if is_done else 400, content_type="application/json")
