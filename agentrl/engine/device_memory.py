"""How much memory of each GPU is in use, asked of the vendor's tool in a process of its own.

amd-smi and rocm-smi can hang in the kernel: every call has a timeout, and none is waited for
after it (ROCm/TheRock#4887, ROCm/rocm-systems#5745).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOL_TIMEOUT_S = 10.0
SLACK_MB = 512
"""Over what was in use before the engine's first start."""
POLL_S = 0.5


def parse_nvidia(text: str) -> dict[str, int]:
    """MiB by index and by UUID, from `nvidia-smi --query-gpu=index,uuid,memory.used` CSV."""
    used = {}
    for line in filter(str.strip, text.splitlines()):
        index, uuid, mb = (part.strip() for part in line.split(","))
        used[index] = used[uuid] = int(mb)
    return used


def parse_amd(text: str) -> dict[str, int]:
    """MiB by index, from `amd-smi metric --mem-usage --json`, with and without its wrapper."""
    found: Any = json.loads(text)
    rows = found["gpu_data"] if isinstance(found, dict) else found
    return {str(row["gpu"]): int(row["mem_usage"]["used_vram"]["value"]) for row in rows}


def parse_rocm(text: str) -> dict[str, int]:
    """MiB by index, from `rocm-smi --showmeminfo vram --json`."""
    return {
        name.removeprefix("card"): int(row["VRAM Total Used Memory (B)"]) >> 20
        for name, row in json.loads(text).items()
        if name.startswith("card")
    }


TOOLS: tuple[tuple[str, tuple[str, ...], Callable[[str], dict[str, int]]], ...] = (
    (
        "nvidia-smi",
        ("--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"),
        parse_nvidia,
    ),
    ("amd-smi", ("metric", "--mem-usage", "--json"), parse_amd),
    ("rocm-smi", ("--showmeminfo", "vram", "--json"), parse_rocm),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    used_mb: Mapping[str, int] | None = None
    said: str = ""
    """Why there is no reading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Freed:
    """How the wait for a killed engine's memory ended."""

    is_free: bool
    waited_s: float
    said: str


async def read(*, timeout_s: float = TOOL_TIMEOUT_S) -> Reading:
    """Ask the first tool on PATH that answers."""
    said = []
    for name, arguments, parse in TOOLS:
        if (path := shutil.which(name)) is None:
            continue
        try:
            return Reading(used_mb=parse(await _run([path, *arguments], timeout_s)))
        except TimeoutError:
            said.append(f"{name} did not answer within {timeout_s:g} s")
        except (ValueError, KeyError, TypeError, OSError) as error:
            said.append(f"{name}: {type(error).__name__}: {error}")
    missing = "none of " + ", ".join(name for name, *_ in TOOLS) + " is on PATH"
    return Reading(said="; ".join(said) or missing)


async def wait_until_free(
    gpus: Sequence[str], before: Mapping[str, int] | None, *, deadline_s: float
) -> Freed:
    """Wait until each of `gpus` has no more in use than `before`, and some slack.

    Skipped, and said so, where no tool answers: the next start then finds out.
    """
    began = time.monotonic()
    while True:
        reading = await read()
        waited = time.monotonic() - began
        if reading.used_mb is None:
            return Freed(is_free=True, waited_s=waited, said=f"not looked at: {reading.said}")
        over = {
            gpu: used
            for gpu in gpus
            if (used := reading.used_mb.get(gpu, 0)) > (before or {}).get(gpu, 0) + SLACK_MB
        }
        if not over:
            return Freed(is_free=True, waited_s=waited, said="free")
        if waited >= deadline_s:
            held = ", ".join(f"GPU {gpu}: {used} MiB" for gpu, used in over.items())
            return Freed(is_free=False, waited_s=waited, said=f"still in use: {held}")
        await asyncio.sleep(POLL_S)


async def _run(command: Sequence[str], timeout_s: float) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # not waited for: in the driver it may never end
        raise
    if process.returncode:
        raise OSError(f"ended with {process.returncode}: {err.decode(errors='replace').strip()}")
    return out.decode(errors="replace")
