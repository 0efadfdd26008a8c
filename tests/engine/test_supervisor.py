"""The supervisor with real engine processes that are killed, paused and lied to."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import events
from agentrl.config import EngineConfig
from agentrl.engine.base import Generation, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.errors import LaunchError
from agentrl.weights.version import Announced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
CONFIG = EngineConfig(context_length=256, max_running=8)
SAMPLING = Sampling(max_new_tokens=240, temperature=1.0)
Announce = Callable[..., Announced]


async def eventually(claim: Callable[[], bool], what: str) -> None:
    until = asyncio.get_running_loop().time() + 120
    while not claim():
        assert asyncio.get_running_loop().time() < until, f"never came true: {what}"
        await asyncio.sleep(0.02)


def supervise(
    tmp_path: Path,
    model: Path,
    body: Callable[[EngineSupervisor, EngineClient], Awaitable[None]],
    announced: Announced | None,
    **changes: Any,
) -> list[events.AnyEvent]:
    """Run `body` with started engines; return the events."""

    async def go() -> None:
        config = EngineConfig(**{**vars(CONFIG), **changes})
        writer = events.EventWriter(tmp_path / "events", "inference")
        supervisor = EngineSupervisor(config, model=model, logs=tmp_path / "logs", events=writer)
        try:
            await supervisor.start(announced)
            async with EngineClient(
                supervisor.urls, config, writer, weights=supervisor.weights
            ) as client:
                await body(supervisor, client)
        finally:
            await supervisor.close()
            writer.close()

    asyncio.run(go())
    return events.read_folder(tmp_path / "events")


def pid_of(supervisor: EngineSupervisor, index: int = 0) -> int:
    process = supervisor._keepers[index].process
    assert process is not None
    return process.pid


def is_whole(got: Generation) -> bool:
    ends = [0, *(span.end for span in got.versions)]
    starts = [span.start for span in got.versions]
    return len(got.token_ids) == len(got.logprobs) == ends[-1] and starts == ends[:-1]


def test_an_update_in_flight_gives_spans_and_no_unproved_engine_is_routable(
    tmp_path: Path, model: Path, other_model: Path, announce: Announce
) -> None:
    async def body(supervisor: EngineSupervisor, client: EngineClient) -> None:
        reply = asyncio.create_task(client.generate([1, 2, 3], SAMPLING, trajectory="t"))
        await asyncio.sleep(0.1)
        before = supervisor.weights()
        update = asyncio.create_task(supervisor.update(announce(other_model, 1)))
        await asyncio.sleep(0)
        assert supervisor.urls() == []
        await update
        assert len(supervisor.urls()) == 1
        assert supervisor.weights() != before
        got = await reply
        assert is_whole(got)
        assert {span.version for span in got.versions} <= {0, 1}
        late = await client.generate([1], SAMPLING, trajectory="u")
        assert [span.version for span in late.versions] == [1]

    happened = supervise(tmp_path, model, body, announce(model, 0))
    proved = [one.version for one in happened if isinstance(one, events.VersionEvent)]
    assert proved == [0, 1]


def test_a_wrong_checksum_is_never_routable_and_ends_in_a_launch_error(
    tmp_path: Path, model: Path, other_model: Path, announce: Announce
) -> None:
    async def body(supervisor: EngineSupervisor, client: EngineClient) -> None:
        wrong = dataclasses.replace(announce(other_model, 1), checksum="0" * 64)
        await supervisor.update(wrong)
        await eventually(lambda: supervisor.failed is not None, "failed")
        assert supervisor.urls() == []
        assert isinstance(supervisor.failed, LaunchError)
        assert "announced with checksum" in str(supervisor.failed)
        assert "engine at http" in str(supervisor.failed), "the log is quoted"

    happened = supervise(tmp_path, model, body, announce(model, 0), max_restarts=1)
    refused = [one for one in happened if getattr(one, "phase", "") == "refused"]
    assert len(refused) == 2


def test_a_call_finishes_on_the_other_engine_when_its_own_is_killed(
    tmp_path: Path, model: Path, announce: Announce
) -> None:
    async def body(supervisor: EngineSupervisor, client: EngineClient) -> None:
        calls = [
            asyncio.create_task(client.generate([one], SAMPLING, trajectory=str(one)))
            for one in range(4)
        ]
        await asyncio.sleep(0.05)
        os.killpg(pid_of(supervisor), signal.SIGKILL)
        replies = await asyncio.gather(*calls)
        assert all(is_whole(one) for one in replies)
        assert len(replies[0].token_ids) == 240

    happened = supervise(tmp_path, model, body, announce(model, 0), count=2)
    assert any(isinstance(one, events.EngineFault) for one in happened)


def test_with_one_engine_a_call_waits_for_the_restart(
    tmp_path: Path, model: Path, announce: Announce
) -> None:
    async def body(supervisor: EngineSupervisor, client: EngineClient) -> None:
        call = asyncio.create_task(client.generate([7], SAMPLING, trajectory="t"))
        await asyncio.sleep(0.05)
        os.killpg(pid_of(supervisor), signal.SIGKILL)
        assert is_whole(await call)

    supervise(tmp_path, model, body, None)


def test_a_stopped_engine_is_found_and_replaced(
    tmp_path: Path, model: Path, announce: Announce
) -> None:
    async def body(supervisor: EngineSupervisor, client: EngineClient) -> None:
        before = pid_of(supervisor)
        os.kill(before, signal.SIGSTOP)
        await eventually(lambda: supervisor.urls() == [], "unroutable")
        await eventually(lambda: len(supervisor.urls()) == 1, "restarted")
        assert pid_of(supervisor) != before
        assert not psutil.pid_exists(before)

    happened = supervise(tmp_path, model, body, announce(model, 0))
    assert "hang" in [getattr(one, "cause", "") for one in happened]


def test_an_engine_that_cannot_start_ends_in_its_own_words(tmp_path: Path) -> None:
    async def never(supervisor: EngineSupervisor, client: EngineClient) -> None:
        raise AssertionError

    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    with pytest.raises(LaunchError, match=r"(?s)failed again after 0 restarts.*log.*ends:.*broken"):
        supervise(tmp_path, folder, never, None, max_restarts=0)


def test_a_model_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    async def never(supervisor: EngineSupervisor, client: EngineClient) -> None:
        raise AssertionError

    with pytest.raises(LaunchError, match=r"would meet the same.*are no folder"):
        supervise(tmp_path, tmp_path / "missing", never, None)


def test_an_engine_whose_log_finds_no_room_ends_in_the_systems_words(
    tmp_path: Path, model: Path
) -> None:
    async def never(supervisor: EngineSupervisor, client: EngineClient) -> None:
        raise AssertionError

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").symlink_to("/dev/full")
    with pytest.raises(LaunchError, match=r"by start: .*No space left on device"):
        supervise(tmp_path, model, never, None, max_restarts=0)


def test_a_log_that_cannot_be_begun_ends_in_the_systems_words(tmp_path: Path, model: Path) -> None:
    async def never(supervisor: EngineSupervisor, client: EngineClient) -> None:
        raise AssertionError

    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(LaunchError, match=r"by start: .*Not a directory"):
        supervise(tmp_path, model, never, None, max_restarts=0)


def test_a_watch_that_breaks_is_told_of_and_does_not_leave_an_engine_unwatched(
    tmp_path: Path,
) -> None:
    class Full(events.NoEvents):
        def write(self, event: events.Event) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    supervisor = EngineSupervisor(
        CONFIG, model=tmp_path / "missing", logs=tmp_path / "logs", events=Full()
    )
    with pytest.raises(LaunchError, match=r"engine-0: its watch failed by OSError\(28"):
        asyncio.run(supervisor.start(None))


def test_engines_die_with_a_supervisor_that_is_killed(tmp_path: Path, model: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from agentrl.config import EngineConfig
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.events import NoEvents
async def go():
    model, logs = Path({str(model)!r}), Path({str(tmp_path)!r})
    s = EngineSupervisor(EngineConfig(), model=model, logs=logs, events=NoEvents())
    await s.start(None)
    print(s._keepers[0].process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(go())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    engine.wait(timeout=60)


def test_a_supervisor_that_was_stopped_for_long_ends_no_engine(tmp_path: Path, model: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from agentrl.config import EngineConfig
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.events import EventWriter
async def go():
    model, folder = Path({str(model)!r}), Path({str(tmp_path)!r})
    s = EngineSupervisor(
        EngineConfig(hang_s=6), model=model, logs=folder, events=EventWriter(folder / "events", "x")
    )
    await s.start(None)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(9)  # a hang would be found by then
    await s.close()
asyncio.run(go())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.send_signal(signal.SIGSTOP)
        time.sleep(13)  # more than twice hang_s
        parent.send_signal(signal.SIGCONT)
        parent.communicate(b"\n", timeout=120)
    assert parent.returncode == 0
    happened = events.read_folder(tmp_path / "events")
    assert [one for one in happened if isinstance(one, events.EngineFault)] == []
    assert any(isinstance(one, events.EngineState) for one in happened)
