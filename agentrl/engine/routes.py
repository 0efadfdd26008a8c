"""HTTP routes of the embedded engine, in SGLang's words."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from tokenizers import Tokenizer

from agentrl.engine.metrics import prometheus
from agentrl.engine.push_routes import PushRoutes
from agentrl.engine.requests import Answer, GenerateBody, Request, check_body
from agentrl.engine.scheduler import Scheduler
from agentrl.errors import RequestRefused

VERSION = "embedded-1"
"""What /server_info says; capabilities.py knows it."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=msgspec.Struct)


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class UpdateBody(msgspec.Struct, kw_only=True):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class CheckBody(msgspec.Struct, kw_only=True):
    action: Literal["checksum"] = "checksum"


class Routes:
    """Turns requests into calls of the scheduler, and its answers into JSON."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer | None, served_name: str = ""
    ) -> None:
        self._scheduler = scheduler
        self._served_name = served_name
        self._batch = scheduler.batch
        self._tokenizer = tokenizer
        self._started = time.time()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.put("/generate", self.generate),
                web.post("/abort_request", self.abort),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.get("/flush_cache", self.flush),
                web.post("/flush_cache", self.flush),
                web.post("/update_weights_from_disk", self.update),
                web.post("/weights_checker", self.check),
                web.get("/health", self.health),
                web.get("/health_generate", self.health),
                web.get("/ready", self.health),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/v1/loads", self.loads),
                web.get("/metrics", self.metrics),
            ]
        )
        app.add_routes(PushRoutes(self._scheduler).routes())
        return app

    async def generate(self, http: web.Request) -> web.Response:
        body = await _read(http, GenerateBody)
        vocabulary = self._batch.model.vocabulary
        check_body(body, context=self._batch.context, vocabulary=vocabulary)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def settle(answer: Answer) -> None:
            if not future.done():  # the client may have gone
                future.set_result(answer)

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(settle, answer)

        request = self._request(body, deliver)
        self._scheduler.submit(request)
        try:
            return _json(self._answer(await future, body))
        except asyncio.CancelledError:  # the client went away
            self._scheduler.cancel(request)
            raise

    async def abort(self, http: web.Request) -> web.Response:
        body = await _read(http, AbortBody)
        if body.rid or body.abort_all:
            await asyncio.wrap_future(self._scheduler.abort(body.rid, everything=body.abort_all))
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        body = await _read(http, PauseBody)
        await asyncio.wrap_future(self._scheduler.pause(body.mode))
        return _json({"status": "ok", "message": f"Generation paused, mode {body.mode}."})

    async def resume(self, http: web.Request) -> web.Response:
        del http
        await asyncio.wrap_future(self._scheduler.resume())
        return _json({"status": "ok", "message": "Generation continued."})

    async def flush(self, http: web.Request) -> web.Response:
        del http
        if await asyncio.wrap_future(self._scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed: requests run or wait.\n")

    async def update(self, http: web.Request) -> web.Response:
        body = await _read(http, UpdateBody)
        if body.abort_all_requests:
            await asyncio.wrap_future(self._scheduler.abort("", everything=True))
        waiting = self._batch.requests if self._scheduler.paused else ()
        paused = len(waiting)
        done, message = await asyncio.wrap_future(
            self._scheduler.update(
                Path(body.model_path),
                self._batch.model.version if body.weight_version is None else body.weight_version,
                is_flushing=body.flush_cache,
            )
        )
        answer = {"success": done, "message": message, "num_paused_requests": paused}
        return _json(answer, status=200 if done else 400)

    async def check(self, http: web.Request) -> web.Response:
        await _read(http, CheckBody)
        whole, each = await asyncio.wrap_future(self._scheduler.checksum())
        return _json({"ranks": [{"checksum": whole, "checksums": each}]})

    async def health(self, http: web.Request) -> web.Response:
        """200 when a command passes the compute thread within 20 s; 503 while paused."""
        del http
        if self._scheduler.paused:
            return web.Response(status=503, text="paused\n")
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._scheduler.ping()), 20)
        except TimeoutError:
            return web.Response(status=503, text="the compute thread does not answer\n")
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        del http
        model = self._batch.model
        return _json({"model_path": str(model.folder), "weight_version": model.version})

    async def server_info(self, http: web.Request) -> web.Response:
        del http
        return _json(
            {
                "version": VERSION,
                "served_model_name": self._served_name,
                "context_length": self._batch.context,
                "max_running_requests": self._batch.max_running,
                "weight_version": self._batch.model.version,
                "uptime_s": time.time() - self._started,
            }
        )

    async def loads(self, http: web.Request) -> web.Response:
        del http
        counters, batch = self._scheduler.counters, self._batch
        return _json(
            {
                "loads": [
                    {
                        "num_running_reqs": len(batch),
                        "num_waiting_reqs": self._scheduler.queued,
                        "num_used_tokens": batch.used_tokens(),
                        "max_total_num_tokens": (batch.max_running + batch.kept) * batch.context,
                        "max_running_requests": batch.max_running,
                        "generated_tokens": counters.generated_tokens,
                        "busy_s": counters.busy_s,
                        "layers_done": batch.model.layers_done,
                        "weight_version": batch.model.version,
                    }
                ]
            }
        )

    async def metrics(self, http: web.Request) -> web.Response:
        del http
        text = prometheus(self._scheduler, uptime_s=time.time() - self._started)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    def _request(self, body: GenerateBody, deliver: Callable[[Answer], None]) -> Request:
        params = body.sampling_params
        own = frozenset() if params.ignore_eos else self._batch.model.stop_ids
        return Request(
            rid=body.rid or uuid.uuid4().hex,
            prompt=np.array(body.input_ids, dtype=np.int64),
            params=params,
            extra_key=body.extra_key or "",
            stop_ids=own | frozenset(params.stop_token_ids or ()),
            deliver=deliver,
        )

    def _answer(self, answer: Answer, body: GenerateBody) -> dict[str, object]:
        request = answer.request
        ids = request.tokens[len(request.prompt) :].tolist()
        meta: dict[str, object] = {
            "id": request.rid,
            "finish_reason": answer.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": request.cached,
            "num_retractions": request.retractions,
            "weight_version": answer.version,
            "weight_versions": request.spans(),
            "e2e_latency": time.time() - request.received,
        }
        if body.return_logprob:
            pairs = zip(request.logprobs.tolist(), ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        text = self._tokenizer.decode(ids) if self._tokenizer else ""
        return {"text": text, "output_ids": ids, "meta_info": meta}


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (RequestRefused, msgspec.ValidationError, msgspec.DecodeError) as error:
        return _json({"error": {"message": str(error), "code": 400}}, status=400)


async def _read(http: web.Request, kind: type[Body]) -> Body:
    raw = await http.read()
    return msgspec.json.decode(raw or b"{}", type=kind)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
