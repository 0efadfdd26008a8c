"""The embedded engine as a process: SGLang's native HTTP interface over the scheduler.

`python -m agentrl.engine.server --model DIR --port 0 --ready-file F` binds a free port and
publishes it in F. Ends by itself when its standard input closes (`--watch-stdin`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from aiohttp import web
from tokenizers import Tokenizer

from agentrl.engine.batch import Batch
from agentrl.engine.guard import watch_stdin
from agentrl.engine.loaded import LoadedModel
from agentrl.engine.routes import Routes
from agentrl.engine.scheduler import Scheduler
from agentrl.handoff.publish import publish_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What the command line says."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 0
    max_running: int = 64
    kept: int = 64
    """Finished sequences kept as prefixes."""
    context_length: int = 512
    prefill_tokens: int = 4096
    """Tokens of one prefill call, padding included."""
    threads: int = 1
    niceness: int = 0
    weight_version: str = "0"
    served_model_name: str = ""
    """By which who started it knows it."""
    ready_file: Path | None = None
    is_watching_stdin: bool = False


def parse(argv: list[str]) -> ServerOptions:
    parser = argparse.ArgumentParser(prog="agentrl.engine.server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--kept", type=int, default=64)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--prefill-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--niceness", type=int, default=0, help="added to this process's")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--watch-stdin", action="store_true", dest="is_watching_stdin")
    return ServerOptions(**vars(parser.parse_args(argv)))


def build(options: ServerOptions) -> tuple[Scheduler, Routes]:
    """Load the model and make what serves it; starts nothing."""
    model = LoadedModel(
        options.model, version=options.weight_version, context=options.context_length
    )
    batch = Batch(
        model=model,
        max_running=options.max_running,
        kept=options.kept,
        context=options.context_length,
        prefill_tokens=options.prefill_tokens,
    )
    scheduler = Scheduler(batch)
    return scheduler, Routes(scheduler, _tokenizer(options.model), options.served_model_name)


async def serve(options: ServerOptions) -> None:
    """Serve until SIGTERM or SIGINT."""
    scheduler, routes = build(options)
    runner = web.AppRunner(routes.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    listener = socket.create_server((options.host, options.port), backlog=1024)
    port = int(listener.getsockname()[1])
    await web.SockSite(runner, listener).start()
    scheduler.start()
    url = f"http://{options.host}:{port}"
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):  # before anybody can know of this process
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    if options.ready_file is not None:
        publish_json(options.ready_file, {"url": url, "port": port, "pid": os.getpid()})
    log.info("engine at %s serves %s, version %s", url, options.model, options.weight_version)
    try:
        await ended.wait()
    finally:
        await asyncio.to_thread(scheduler.stop)
        await runner.cleanup()


def main(argv: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if options.is_watching_stdin:
        watch_stdin()
    os.nice(options.niceness)
    torch.set_num_threads(options.threads)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options))


def _tokenizer(folder: Path) -> Tokenizer | None:
    """A version's folder may have none: answers then carry an empty text."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


if __name__ == "__main__":
    main()
