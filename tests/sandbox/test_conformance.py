"""The contract of every back end: one suite, run against each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from boxes import sleepers, until
from processes import children

from agentrl.errors import SandboxLost, SandboxStartError
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.lease import marked

SECONDS = str(200_000 + os.getpid())
"""How long the sleeps of these tests last: also what tells them from those of another run."""


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_output_and_exit_code_come_back(box: Any) -> None:
    done = box.sh("echo out; echo err >&2; exit 3")
    assert (done.output, done.exit_code, done.timed_out) == ("out\nerr\n", 3, False)


def test_commands_start_in_the_testbed_with_their_tools(box: Any) -> None:
    done = box.sh(
        "cat link && sed -n 1p a.txt && python -c 'print(1+1)' && python3 -V && git init -q"
    )
    assert done.exit_code == 0, done.output
    assert done.output.startswith("one\none\n2\nPython 3")


def test_environment_of_a_command_is_added(box: Any) -> None:
    done = box.sh("echo $WORD $LANG $PYTHONDONTWRITEBYTECODE", env={"WORD": "it's"})
    assert done.output == "it's C.UTF-8 1\n"


def test_host_environment_is_absent(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    done = box.sh("env; cat /proc/self/environ /proc/1/environ 2>/dev/null")
    assert "SECRET_TOKEN" not in box.sh("env").output
    assert box.kind == "process" or "hush" not in done.output


def test_the_image_stays_untouched(box: Any) -> None:
    before = tree(box.image)
    done = box.sh(
        "echo two > a.txt; rm -r pkg; mkdir pkg; echo y > pkg/new.py; cat a.txt pkg/new.py"
    )
    assert done.output == "two\ny\n"
    assert tree(box.image) == before


def test_files_live_from_one_command_to_the_next(box: Any) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.exec("echo kept > b.txt; cd /tmp", timeout_s=30)
        return (await sandbox.exec("cat b.txt", timeout_s=30)).output

    assert box.run(body) == "kept\n"


def test_the_shell_is_the_one_that_was_asked_for(box: Any) -> None:
    assert box.sh("echo $0").output == "bash\n"
    assert box.set(shell="sh").sh("echo $0").output == "sh\n"


def test_stdin_is_empty(box: Any) -> None:
    done = box.sh("cat; read line; echo $?")
    assert (done.output, done.timed_out) == ("1\n", False)


def test_undecodable_bytes_are_replaced(box: Any) -> None:
    assert box.sh(r"printf 'a\xffb'").output == "a\ufffdb"


def test_endless_output_stops_at_the_timeout_with_little_memory(box: Any) -> None:
    before = psutil.Process().memory_info().rss
    done = box.sh("yes", timeout_s=1)
    assert done.timed_out
    assert done.truncated
    assert done.exit_code == -1
    assert len(done.output) < 10_200
    assert psutil.Process().memory_info().rss - before < 30 << 20


def test_output_before_a_timeout_is_kept(box: Any) -> None:
    done = box.sh("echo before; sleep 60", timeout_s=3)
    assert (done.output, done.timed_out) == ("before\n", True)


def test_what_a_background_command_leaves_is_reaped(box: Any) -> None:
    whose = "--ppid $PPID" if box.kind == "process" else "ax"  # there it sees the host's
    dead = f"[ $(ps {whose} -o stat= | grep -c ^Z) -lt 5 ]"

    async def body(sandbox: Sandbox) -> Any:
        await sandbox.exec("for i in $(seq 30); do (setsid sleep 0.01 &); done", timeout_s=30)
        return await sandbox.exec(f"until {dead}; do sleep 0.1; done", timeout_s=60)

    assert box.run(body).exit_code == 0


def test_two_hundred_megabytes_can_be_written(box: Any) -> None:
    done = box.set(file_mb=256, disk_mb=300).sh("head -c 200000000 /dev/zero > big; wc -c < big")
    assert done.output == "200000000\n"


def test_memory_of_all_processes_together_is_bounded_and_said(box: Any) -> None:
    hold = "python3 -c \"import time; x = b'1' * (60 << 20); time.sleep(30)\""
    command = f"for i in 1 2 3 4; do {hold} & done; wait"
    done = box.set(total_memory_mb=150).sh(command, timeout_s=60)
    assert done.oom
    assert not done.timed_out


def test_head_and_tail_of_long_output_are_kept(box: Any) -> None:
    done = box.sh("echo FIRST; head -c 64000000 /dev/zero | tr '\\0' x; echo LAST", max_bytes=1000)
    assert done.output.startswith("FIRST\n")
    assert done.output.endswith("LAST\n")
    assert done.truncated
    assert f"{64_000_000 + 11 - 1000} bytes elided" in done.output


def test_output_at_the_limit_is_whole(box: Any) -> None:
    done = box.sh("head -c 1000 /dev/zero | tr '\\0' x", max_bytes=1000)
    assert (done.output, done.truncated) == ("x" * 1000, False)


def test_a_timeout_kills_the_whole_tree(box: Any) -> None:
    async def body(sandbox: Sandbox) -> Any:
        sleep = f"sleep {SECONDS}"
        command = f"trap '' TERM; setsid {sleep} & nohup {sleep} & {sleep}"
        done = await sandbox.exec(command, timeout_s=1)
        return done, await sandbox.exec(f"pgrep -fc '[s]leep {SECONDS}'", timeout_s=30)

    done, left = box.run(body)
    assert done.timed_out
    assert done.seconds < 30
    assert left.output == "0\n"


def test_a_background_child_does_not_hold_the_command(box: Any) -> None:
    count = f"pgrep -fc '[s]leep {SECONDS}'"

    async def body(sandbox: Sandbox) -> Any:
        done = await sandbox.exec(f"sleep {SECONDS} & echo started", timeout_s=30)
        alive = await sandbox.exec(f"until {count}; do sleep 0.1; done", timeout_s=30)
        await sandbox.stop_processes()
        return done, alive, await sandbox.exec(count, timeout_s=30)

    done, alive, stopped = box.run(body)
    assert (done.output, done.timed_out) == ("started\n", False)
    assert (alive.output.split()[-1], stopped.output) == ("1", "0\n")


def test_a_background_child_may_go_on_writing(box: Any) -> None:
    async def body(sandbox: Sandbox) -> Any:
        loop = "for i in 1 2 3; do echo noise; sleep 0.05; done; touch done.txt"
        await sandbox.exec(f"({loop}) & echo", timeout_s=30)
        return await sandbox.exec("until [ -e done.txt ]; do sleep 0.02; done", timeout_s=30)

    assert box.run(body).exit_code == 0


def test_stop_processes_keeps_files(box: Any) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        await sandbox.exec("echo kept > b.txt; setsid sleep 9 &", timeout_s=30)
        await sandbox.stop_processes()
        return await sandbox.get("b.txt")

    assert box.run(body) == b"kept\n"


def test_memory_is_bounded_and_said(box: Any) -> None:
    done = box.sh("python -c 'x = bytearray(2 << 30)'")
    assert done.exit_code != 0
    assert done.oom


def test_cpu_time_is_bounded(box: Any) -> None:
    done = box.set(cpu_s=1).sh("while :; do :; done", timeout_s=100)
    assert not done.timed_out
    assert done.exit_code == 128 + signal.SIGXCPU


def test_file_size_is_bounded(box: Any) -> None:
    done = box.set(file_mb=1).sh("head -c 3000000 /dev/zero > big; stat -c %s big")
    assert done.output.splitlines()[-1] == str(1 << 20)


def test_a_nul_in_a_command_is_an_observation(box: Any) -> None:
    assert box.sh("echo \0").exit_code == 126


def test_a_command_too_long_for_the_kernel_is_an_observation(box: Any) -> None:
    done = box.sh("echo " + "x" * 300_000)
    assert done.exit_code == 126
    assert "Argument list too long" in done.output


def test_binary_files_go_in_and_out(box: Any) -> None:
    data = bytes(range(256)) * 5000

    async def body(sandbox: Sandbox) -> Any:
        await sandbox.put("new folder/it's.bin", data)
        await sandbox.put("/testbed/abs.bin", b"abs")
        seen = await sandbox.exec('wc -c < "new folder/it\'s.bin"; cat abs.bin', timeout_s=30)
        cut = await sandbox.get("new folder/it's.bin", max_bytes=10)
        return seen.output, await sandbox.get("new folder/it's.bin", max_bytes=1 << 22), cut

    assert box.run(body) == ("1280000\nabs", data, data[:10])


def test_a_missing_file_says_so(box: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        box.run(lambda sandbox: sandbox.get("none.txt"))


def test_put_replaces_what_a_command_put_in_the_way(box: Any) -> None:
    async def body(sandbox: Sandbox) -> Any:
        await sandbox.exec("rm a.txt link; mkfifo a.txt; ln -s pkg/mod.py link", timeout_s=30)
        await sandbox.put("a.txt", b"new")
        await sandbox.put("link", b"new")
        return await sandbox.exec("cat a.txt link pkg/mod.py", timeout_s=30)

    assert box.run(body).output == "newnewx = 1\n"


def test_a_file_operation_that_fails_leaves_the_sandbox_usable(box: Any) -> None:
    async def body(sandbox: Sandbox) -> Any:
        with pytest.raises(OSError, match="pkg"):
            await sandbox.put("pkg", b"")
        return await sandbox.exec("echo on", timeout_s=30)

    assert box.run(body).output == "on\n"


def test_a_killed_process_is_a_lost_sandbox_for_running_and_later_commands(box: Any) -> None:
    async def body(sandbox: Any) -> None:
        running = asyncio.ensure_future(sandbox.exec(f"sleep {SECONDS}", timeout_s=600))
        await until(lambda: sleepers(SECONDS), in_thread=True)
        await box.lose(sandbox)
        with pytest.raises(SandboxLost, match="gone"):
            await asyncio.wait_for(running, 60)
        with pytest.raises(SandboxLost):
            await sandbox.exec("true", timeout_s=30)

    box.run(body)


def test_close_is_idempotent_and_leaves_nothing(box: Any) -> None:
    async def body(provider: SandboxProvider) -> None:
        sandbox: Any = await provider.start(box.image, owner="0/0/0")
        (lease,) = box.leases.glob("*.json")
        await sandbox.exec(f"setsid sleep {SECONDS} & sleep {SECONDS} &", timeout_s=30)
        await asyncio.gather(sandbox.close(), sandbox.close())
        await sandbox.close()
        with pytest.raises(SandboxLost, match="closed"):
            await sandbox.exec("true", timeout_s=30)
        assert marked(lease.stem) == []
        assert sleepers(SECONDS) == []

    box.provider(body)
    assert list(box.leases.iterdir()) == []


def test_closing_the_provider_closes_all_and_refuses_new_ones(box: Any) -> None:
    async def body(provider: SandboxProvider) -> None:
        first: Any = await provider.start(box.image, owner="0/0/0")
        await provider.close()
        with pytest.raises(SandboxLost):
            await first.exec("true", timeout_s=30)
        with pytest.raises(SandboxStartError, match="closed"):
            await provider.start(box.image, owner="0/0/1")

    box.provider(body)


def test_a_start_under_way_when_the_provider_closes_leaves_nothing(box: Any) -> None:
    async def body(provider: SandboxProvider) -> None:
        start = asyncio.ensure_future(provider.start(box.image, owner="0/0/0"))
        await until(lambda: list(box.leases.iterdir()))
        await provider.close()
        with pytest.raises(SandboxStartError, match=r"closed|ended|gone"):
            await start
        await until(box.has_nothing)

    box.provider(body)


def test_an_image_without_a_testbed_is_a_start_error(box: Any, tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="testbed"):
        box.provider(lambda provider: provider.start(tmp_path, owner="0/0/0"))
    assert list(box.leases.iterdir()) == []


@pytest.mark.parametrize("moment", ["at once", "when leased", "when running"])
def test_a_cancelled_start_leaves_nothing(box: Any, moment: str) -> None:
    moments: dict[str, Callable[[], object]] = {
        "at once": lambda: True,
        "when leased": lambda: list(box.leases.iterdir()),
        # of a service's sandbox nothing is seen here but its lease
        "when running": lambda: box.kind in ("docker", "e2b") or children(),
    }

    async def body(provider: SandboxProvider) -> None:
        start = asyncio.ensure_future(provider.start(box.image, owner="0/0/0"))
        await asyncio.sleep(0)
        await until(moments[moment])
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await until(box.has_nothing)

    box.provider(body)


def test_a_start_past_its_deadline_is_a_start_error_and_leaves_nothing(box: Any) -> None:
    with pytest.raises(SandboxStartError, match=r"start_timeout_s=0\.001"):
        box.set(start_timeout_s=0.001).run(lambda sandbox: sandbox.close())
    assert box.has_nothing()


def test_a_cancelled_command_ends_its_sandbox(box: Any) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await sandbox.exec("sleep 60", timeout_s=60)
        with pytest.raises(SandboxLost, match="cancelled"):
            await sandbox.exec("true", timeout_s=30)

    box.run(body)


def test_a_provider_of_the_process_kind_says_that_it_isolates_nothing(
    box: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(provider: SandboxProvider) -> str:
        return provider.name

    name = box.provider(body)
    assert name == ("process (no isolation)" if box.kind == "process" else box.kind)
    assert ("NO isolation" in caplog.text) == (box.kind == "process")
