"""The vendors' tools as programs on PATH: read, waited for, and left when they hang."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.engine.device_memory import parse_amd, parse_nvidia, parse_rocm, read, wait_until_free

Tool = Callable[[str, str], Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Put a program on PATH, beside the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(name: str, body: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


def test_nvidia_is_read_by_index_and_by_uuid() -> None:
    assert parse_nvidia("0, GPU-aa, 512\n1, GPU-bb, 90112\n") == {
        "0": 512,
        "GPU-aa": 512,
        "1": 90112,
        "GPU-bb": 90112,
    }


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_amd_is_read_in_both_shapes(is_wrapped: bool) -> None:
    rows = [{"gpu": 3, "mem_usage": {"used_vram": {"value": 283, "unit": "MB"}}}]
    assert parse_amd(json.dumps({"gpu_data": rows} if is_wrapped else rows)) == {"3": 283}


def test_rocm_is_read_in_bytes() -> None:
    text = json.dumps({"card2": {"VRAM Total Used Memory (B)": str(3 << 30)}, "system": {}})
    assert parse_rocm(text) == {"2": 3072}


def test_without_a_tool_the_wait_is_skipped_and_says_so(tool: Tool) -> None:
    freed = asyncio.run(wait_until_free(["0"], None, deadline_s=5))
    assert freed.is_free
    assert "none of nvidia-smi, amd-smi, rocm-smi is on PATH" in freed.said


def test_memory_that_comes_free_ends_the_wait(tool: Tool, tmp_path: Path) -> None:
    tool("nvidia-smi", f'[ -e "{tmp_path}/seen" ] && echo "0, G, 100" || echo "0, G, 80000"; '
                       f'touch "{tmp_path}/seen"')  # fmt: skip
    freed = asyncio.run(wait_until_free(["0"], {"0": 90}, deadline_s=30))
    assert (freed.is_free, freed.said) == (True, "free")
    assert freed.waited_s > 0


def test_memory_that_stays_in_use_ends_the_wait_at_the_deadline(tool: Tool) -> None:
    tool("nvidia-smi", 'echo "0, G, 80000"; echo "1, H, 70000"')
    freed = asyncio.run(wait_until_free(["0"], {}, deadline_s=0.1))
    assert (freed.is_free, freed.said) == (False, "still in use: GPU 0: 80000 MiB")


def test_a_tool_that_hangs_is_left_and_the_next_one_asked(tool: Tool) -> None:
    tool("amd-smi", "exec sleep 600")
    tool("rocm-smi", """echo '{"card0": {"VRAM Total Used Memory (B)": "1048576"}}'""")
    began = time.monotonic()
    assert asyncio.run(read(timeout_s=0.3)).used_mb == {"0": 1}
    assert time.monotonic() - began < 30


def test_a_tool_that_fails_is_quoted(tool: Tool) -> None:
    tool("nvidia-smi", "echo 'Failed to initialize NVML' >&2; exit 9")
    assert "ended with 9: Failed to initialize NVML" in asyncio.run(read()).said
