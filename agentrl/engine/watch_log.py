"""What the log and the end of one engine's process tell."""

from __future__ import annotations

import asyncio
import signal

from agentrl.engine.faults import LogReader
from agentrl.engine.process import EngineProcess
from agentrl.engine.restarts import Fault

LOG_EVERY_S = 0.25
MAX_PIECES = 1 << 15
"""Of a log at once, 4 GiB: one that grows as fast as it is read would have no end."""
REST_OF_LOG_S = 1.0
"""A traceback names its cause some lines after it says that there is one."""


async def read_on(process: EngineProcess, log: LogReader) -> None:
    """Take in what was written since, however much that is, and let others run meanwhile."""
    for _ in range(MAX_PIECES):
        if not (piece := process.read_log()):
            return
        log.feed(piece)
        await asyncio.sleep(0)


async def watch_exit(process: EngineProcess, log: LogReader) -> Fault:
    """Wait for the end; what the log says of its cause is the cause."""
    code = await process.wait()
    await read_on(process, log)
    log.end()
    detail = f"process {process.pid} ended with {_meaning(code)}"
    if log.cause is None:
        return Fault(cause="exit", detail=detail, unknown_lines=log.unknown.total())
    return Fault(
        cause=log.cause.kind,
        detail=f"{log.cause.text} ({detail})",
        unknown_lines=log.unknown.total(),
    )


async def watch_log(process: EngineProcess, log: LogReader) -> Fault:
    """Read the log as it grows until it tells of a fault."""
    while log.acting is None:
        await asyncio.sleep(LOG_EVERY_S)
        await read_on(process, log)
    await asyncio.sleep(REST_OF_LOG_S)
    await read_on(process, log)
    log.end()
    assert log.cause is not None  # set with the first fault
    return Fault(cause=log.cause.kind, detail=log.cause.text, unknown_lines=log.unknown.total())


def _meaning(code: int) -> str:
    """Say what an exit code means; the guard hands on a signal as 256 less its number."""
    number = -code if code < 0 else 256 - code if code > 192 else 0
    try:
        name = signal.Signals(number).name if number else ""
    except ValueError:
        name = ""
    if name == "SIGKILL":
        return f"{code} (SIGKILL: by a person, by Slurm, or by the kernel for want of memory)"
    return f"{code} ({name})" if name else str(code)
