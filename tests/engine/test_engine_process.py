"""An engine's process and its log, whatever happens to that file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.engine.process import EngineProcess


def test_a_log_that_is_cut_short_or_gone_is_read_as_far_as_it_is_there(odd_path: Path) -> None:
    async def go() -> None:
        process = await EngineProcess.start(["sleep", "600"], odd_path / "log")
        try:
            process.log.write_text("a long first line\n")
            assert process.read_log() == "a long first line\n"
            process.log.write_text("cut\n")
            assert process.read_log() == "cut\n"
            process.log.unlink()
            assert process.read_log() == ""
            process.log.write_text("cut\nand more\n")
            assert process.read_log() == "and more\n"
        finally:
            await process.kill()

    asyncio.run(go())
