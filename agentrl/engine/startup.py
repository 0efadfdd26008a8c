"""From a command line to an engine that answers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from agentrl.config import EngineConfig
from agentrl.engine.command import StartOptions, engine_command
from agentrl.engine.devices import EngineShare, free_ports
from agentrl.engine.heads import refuse_lost_head
from agentrl.engine.process import EngineProcess, tail
from agentrl.engine.progress import STREAM_TOKENS
from agentrl.errors import LaunchError, WaitTimeout
from agentrl.weights.version import Announced, lease, release

POLL_S = 0.05
WATCHED = {"SGLANG_FORCE_STREAM_INTERVAL": str(STREAM_TOKENS)}
"""What the watch relies on, whatever else is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Where the answer will come from: a file that names the port, or a known port."""

    file: Path | None = None
    url: str | None = None
    name: str = ""
    """What that server calls itself, if it was told."""


class Leased:
    """Keeps an announced version from being pruned while an engine reads it."""

    def __init__(self, announced: Announced | None, owner: str) -> None:
        self._announced = announced
        self._owner = owner

    def __enter__(self) -> None:
        if self._announced is not None:
            lease(self._announced.folder.parent, self._announced.version, self._owner)

    def __exit__(self, *end: object) -> None:
        if self._announced is not None:
            release(self._announced.folder.parent, self._announced.version, self._owner)


class MissingModel(LaunchError):
    """No restart can find it either."""


class MissingServer(LaunchError):
    """Nor is the interpreter there that has SGLang."""


class TakenPort(LaunchError):
    """Another process took the port after it was found free; the next start takes another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What one start of one engine differs in from the others."""

    index: int
    announced: Announced | None
    log: Path
    share: EngineShare
    graphs: bool = True


async def launch(config: EngineConfig, model: Path, start: Start) -> tuple[EngineProcess, Ready]:
    """Start an engine with the announced weights, or with the starting model.

    Raises LaunchError where the weights' folder or the server is missing, the server would lose the
    model's head, or no port is free.
    """
    announced, share = start.announced, start.share
    python = config.sglang.python if config.kind == "sglang" else ""
    if python and shutil.which(python) is None:
        raise MissingServer(
            f"engine {start.index}: engine.sglang.python={python} is no program here. On a machine "
            "without a GPU `make sglang` puts it there; in an image that has SGLang leave it empty"
        )
    weights = (model if announced is None else announced.folder).absolute()
    if not weights.is_dir():
        raise MissingModel(
            f"engine {start.index}: its weights {weights} are no folder here; give model.path a "
            "folder in Hugging Face's layout that this node sees"
        )
    is_embedded = config.kind == "embedded"
    if not is_embedded:
        refuse_lost_head(weights)
    ready_file = start.log.parent / f"engine-{start.index}.ready.json" if is_embedded else None
    port, nccl_port = (0, None) if is_embedded else free_ports(2, share.ports)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    name = "" if is_embedded else f"engine-{start.index}-{os.urandom(8).hex()}"
    options = StartOptions(
        index=start.index,
        weights=weights,
        tokenizer=model.absolute(),
        version=0 if announced is None else announced.version,
        port=port,
        nccl_port=nccl_port,
        served_name=name,
        ready_file=None if ready_file is None else ready_file.absolute(),
        is_masked=bool(share.environment),
        graphs=start.graphs,
    )
    command = engine_command(config, options)
    environ = share.environ(dict(os.environ)) | command.environment | WATCHED
    process = await EngineProcess.start(command.arguments, start.log, environ=environ)
    url = None if is_embedded else f"http://127.0.0.1:{port}"
    return process, Ready(file=ready_file, url=url, name=name)


def refuse_stranger(ready: Ready, info: Mapping[str, object]) -> None:
    """Raise TakenPort unless /server_info says `info` of the server that was started."""
    found = info.get("served_model_name")
    if ready.name and found != ready.name:
        raise TakenPort(
            f"{ready.url} is answered by a server that calls itself {found!r}, ours was told to be "
            f"{ready.name}: another process took that port. Give engines ports that nothing else "
            "on the node uses"
        )


async def wait_until_ready(
    session: aiohttp.ClientSession, process: EngineProcess, ready: Ready, *, timeout_s: float
) -> str:
    """Return the address once the server itself answers that it is healthy.

    Raises LaunchError when the process ended, WaitTimeout after `timeout_s`; both quote the log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        url = ready.url or _read_url(ready.file)
        if url is not None and await _is_up(session, url):
            return url
        if process.exit_code is not None:
            raise LaunchError(
                f"the engine ended with {process.exit_code} before it answered; its log "
                f"{process.log} ends:\n{tail(process.log)}"
            )
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"the engine did not answer within engine.start_timeout_s={timeout_s}; its log "
                f"{process.log} ends:\n{tail(process.log)}"
            )
        await asyncio.sleep(POLL_S)


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=20)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _read_url(file: Path | None) -> str | None:
    if file is None or not file.is_file():
        return None
    return str(json.loads(file.read_bytes())["url"])
