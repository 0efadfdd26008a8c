"""What the supervisor asks of one engine over HTTP: load weights, prove them, say how it is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from agentrl.engine.capabilities import Capabilities, capabilities
from agentrl.engine.progress import Load
from agentrl.weights.push import Push

QUICK_S = 30.0
"""Longest that an answer about the state may take, seconds."""

PROBE_PATH = "/health_generate"
MAX_ANSWER = 1 << 26
"""Bytes: the checksums of a large mixture of experts are some MB."""
MAX_METRICS = 1 << 22
"""Bytes of /metrics; SGLang's are 0.1 MB a rank."""
_Kind = TypeVar("_Kind")


class OddAnswer(aiohttp.ClientError):
    """The server answered, and not what was asked; it counts as no answer."""


class _Model(msgspec.Struct):
    weight_version: str


class _Checked(msgspec.Struct):
    ranks: list[dict[str, Any]]


class _Rank(msgspec.Struct):
    """One of /v1/loads; what has a default is said by the embedded engine only, or by SGLang."""

    num_running_reqs: int
    num_waiting_reqs: int
    generated_tokens: int = 0
    busy_s: float = 0.0
    timestamp: float = 0.0
    num_used_tokens: float = 0.0
    layers_done: float = 0.0

    @property
    def mark(self) -> tuple[float, ...]:
        """What moves when the engine computes."""
        return (self.timestamp, self.num_used_tokens, self.generated_tokens, self.layers_done)


class _Loads(msgspec.Struct):
    loads: list[_Rank]


def open_session() -> aiohttp.ClientSession:
    """Return what EngineAdmin asks through: a connection for each request.

    SGLang closes those that rest for 5 s, and a pause that is sent just then fails: it would cost
    the engine.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


class EngineAdmin:
    """Raises aiohttp.ClientError and TimeoutError when the engine does not answer, or nonsense."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, update_timeout_s: float
    ) -> None:
        self._session = session
        self.url = url
        self._update_timeout_s = update_timeout_s

    async def server_info(self) -> dict[str, Any]:
        return await self._get("/server_info")

    async def capabilities(self) -> Capabilities:
        return capabilities(str((await self.server_info()).get("version", "")))

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """True when a request passed through the whole engine.

        Not by /health: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, as some images set, makes that
        answer 200 whatever hangs.
        """
        url = f"{self.url}{PROBE_PATH}"
        async with self._session.get(url, timeout=_total(timeout_s)) as response:
            return response.status == 200

    async def weight_version(self) -> str:
        return _read(await self._get("/model_info"), _Model).weight_version

    async def checksums(self) -> list[dict[str, Any]]:
        """Return what /weights_checker says of each rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return _read(answer, _Checked).ranks

    async def pause(self, mode: str) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update(self, folder: Path, version: int, *, is_flushing: bool) -> str:
        """Ask for the weights in `folder`; return the engine's message.

        Neither 200 nor 400 says whether they are loaded: only the proof does.
        """
        body = {
            "model_path": str(folder.absolute()),
            "weight_version": str(version),
            "flush_cache": is_flushing,
        }
        answer = await self._post("/update_weights_from_disk", body)
        return str(answer.get("message", answer))

    async def join_group(self, push: Push, rank: int) -> str:
        """Take part in the group of a push; return why not, empty if it does."""
        body = {
            "master_address": push.address,
            "master_port": push.port,
            "rank_offset": rank,
            "world_size": push.size,
            "group_name": push.group,
            "backend": push.backend,
        }
        return _failure(await self._post("/init_weights_update_group", body))

    async def leave_group(self, name: str) -> None:
        """Close its end of a group; that it has none by that name is as well."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def receive(self, push: Push, *, has_brackets: bool, is_flushing: bool) -> str:
        """Take all of a push's buckets in; return why not, empty if all came.

        has_brackets: the server wants to be told where an update begins and ends.
        """
        if has_brackets:
            await self._post("/begin_weight_update", {})
        for place, bucket in enumerate(push.buckets, 1):
            body = {
                **asdict(bucket),
                "group_name": push.group,
                "weight_version": str(push.version),
                "flush_cache": is_flushing and place == len(push.buckets),
                "abort_all_requests": False,
                "load_format": "flattened_bucket",
            }
            if why := _failure(await self._post("/update_weights_from_distributed", body)):
                return why
        return _failure(await self._post("/end_weight_update", {})) if has_brackets else ""

    async def load(self, *, timeout_s: float = QUICK_S) -> Load:
        """Sum /v1/loads over data-parallel ranks; what SGLang does not count stays 0.

        SGLang publishes each prefill, and each 15th decode step, with a time stamp.
        """
        ranks = _read(await self._get("/v1/loads", timeout_s=timeout_s), _Loads).loads
        return Load(
            running=sum(one.num_running_reqs for one in ranks),
            waiting=sum(one.num_waiting_reqs for one in ranks),
            generated_tokens=sum(one.generated_tokens for one in ranks),
            busy_s=sum(one.busy_s for one in ranks),
            mark=tuple(moving for one in ranks for moving in one.mark),
        )

    async def metrics(self) -> str:
        async with self._session.get(f"{self.url}/metrics", timeout=_total(QUICK_S)) as response:
            response.raise_for_status()
            return (await _body(response, at_most=MAX_METRICS)).decode(errors="replace")

    async def _get(self, path: str, *, timeout_s: float = QUICK_S) -> dict[str, Any]:
        async with self._session.get(self.url + path, timeout=_total(timeout_s)) as response:
            response.raise_for_status()
            return _decode(await _body(response))

    async def _post(self, path: str, body: object) -> dict[str, Any]:
        async with self._session.post(
            self.url + path, json=body, timeout=_total(self._update_timeout_s)
        ) as response:
            return _decode(await _body(response))


async def _body(response: aiohttp.ClientResponse, *, at_most: int = MAX_ANSWER) -> bytes:
    """Read an answer's body. Raises OddAnswer for one of more than `at_most` bytes."""
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 18):
        body += piece
        if len(body) > at_most:
            raise OddAnswer(f"{response.url} answers over {at_most} bytes: {bytes(body[:300])!r}")
    return bytes(body)


def _read(answer: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """Raises OddAnswer."""
    try:
        return msgspec.convert(answer, kind, strict=False)
    except msgspec.ValidationError as error:
        raise OddAnswer(f"{error}: {str(answer)[:300]}") from error


def _failure(answer: dict[str, Any]) -> str:
    if answer.get("success", True) and "error" not in answer:
        return ""
    return str(answer.get("message") or answer.get("error") or answer)


def _decode(raw: bytes) -> dict[str, Any]:
    """Answers without a JSON object come back under `message`."""
    try:
        return msgspec.json.decode(raw or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"message": raw.decode(errors="replace")}


def _total(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
