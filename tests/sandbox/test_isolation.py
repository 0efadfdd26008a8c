"""What commands in a sandbox cannot see, reach, change or use up."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from pathlib import Path
from typing import Any

from processes import children

from agentrl.sandbox.base import Sandbox, SandboxProvider

BOMB = ":(){ :|:& };:"
PROJECT = Path(__file__).parents[2]


def test_the_hosts_folders_cannot_be_read(bubble: Any) -> None:
    folders = shlex.join([str(Path.home()), str(PROJECT), "/root", "/var", "/srv", "/etc/shadow"])
    done = bubble.sh(f"ls -d {folders}; ls -A /home; grep -c . /etc/passwd")
    assert done.output.count("No such file") == 6, done.output
    assert done.output.endswith("agent\n1\n")


def test_the_project_is_not_importable(sealed: Any) -> None:
    assert "ModuleNotFoundError" in sealed.sh("python -c 'import agentrl'").output


def test_the_network_is_unreachable(sealed: Any) -> None:
    program = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
    done = sealed.sh(f'python -c "{program}"')
    assert "Network is unreachable" in done.output
    assert sealed.sh("tail -n +3 /proc/net/dev | cut -d: -f1").output.split() == ["lo"]


def test_the_hosts_servers_on_loopback_are_unreachable(sealed: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        )
        done = sealed.sh(f'python -c "{program}"')
    assert "Connection refused" in done.output or "unreachable" in done.output


def test_the_system_is_read_only(bubble: Any) -> None:
    places = ("/", "/usr", "/etc", "/opt", "/dev", "/home", "/proc/sys/kernel", "/proc/irq")
    loop = (
        f"for d in {' '.join(places)}; do touch $d/new 2>/dev/null && echo $d; done; ls -d /*/new"
    )
    assert bubble.sh(loop).output == "ls: cannot access '/*/new': No such file or directory\n"


def test_devices_of_the_host_cannot_be_changed(sealed: Any) -> None:
    before = os.stat("/dev/null").st_mode
    done = sealed.sh("chmod 600 /dev/null; chown 1 /dev/zero; rm /dev/null; echo $?")
    if sealed.kind != "docker":  # whose devices are files of the container itself
        assert done.output.count("Read-only file system") == 3, done.output
    assert os.stat("/dev/null").st_mode == before


def test_the_private_folders_are_writable(bubble: Any) -> None:
    done = bubble.sh("touch /tmp/a ~/b /dev/shm/c /testbed/d && echo $HOME && echo > /dev/null")
    assert done.output == "/home/agent\n"


def test_privileges_are_gone(sealed: Any) -> None:
    done = sealed.sh("grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    found = dict(line.split(":\t") for line in done.output.splitlines())
    assert found.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in found.values()} == {0}


ATTEMPTS = (
    "mount -t tmpfs none /tmp",
    "mount -o remount,rw /",
    "umount /proc/sys",
    "unshare -Ur true",
    "unshare -n true",
    "chroot / true",
    "hostname other",
    "kill -9 1; test ! -d /proc/1",
    "echo > /proc/1/fd/1",
    "cat /proc/1/environ",
    "head -c 1 /proc/1/mem",
    "echo 9999999 > /proc/sys/kernel/pid_max",
    "prlimit --pid 1 --as=1",
    "prlimit --pid 1 --nofile=0",
    "chrt --idle --pid 0 1",
    "taskset -p 1 1",
    "echo 1000 > /proc/1/oom_score_adj",
    "ls /.scratch",
    "ls /.image",
)


BORNE = {"docker": ["echo 1000 > /proc/1/oom_score_adj", "ls /.image"]}
"""What a kind cannot refuse. Docker gives its containers no right to mount, so nothing is hidden or
made read-only there: the untouched testbed can be read, and the executor made the first that the
kernel ends when the container's memory is used up (the watch over it comes before that)."""


def test_commands_cannot_undo_the_sandbox(sealed: Any) -> None:
    async def body(sandbox: Sandbox) -> list[str]:
        done = {attempt: await sandbox.exec(attempt, timeout_s=60) for attempt in ATTEMPTS}
        return [attempt for attempt, result in done.items() if result.exit_code == 0]

    assert sealed.run(body) == BORNE.get(sealed.kind, [])


def test_a_command_may_still_set_its_own_limits(sealed: Any) -> None:
    done = sealed.sh("prlimit --nofile=100 sh -c 'ulimit -n'; nice true && taskset 1 true")
    assert (done.output, done.exit_code) == ("100\n", 0)


def test_signals_do_not_end_the_executor(sealed: Any) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.exec("for s in $(seq 1 64); do kill -$s 1; done 2>/dev/null", timeout_s=30)
        return (await sandbox.exec("echo alive", timeout_s=30)).output

    assert sealed.run(body) == "alive\n"


def test_two_sandboxes_do_not_see_each_other(sealed: Any) -> None:
    async def body(provider: SandboxProvider) -> Any:
        one, two = await asyncio.gather(
            provider.start(sealed.image, owner="0/0/0"), provider.start(sealed.image, owner="0/1/0")
        )
        await one.exec(
            "echo mine | tee /tmp/x ~/x /testbed/x /dev/shm/x; sleep 95432 &", timeout_s=30
        )
        return await two.exec(
            "ls /tmp/x ~/x /testbed/x /dev/shm/x; pgrep -fc 95[4]32", timeout_s=30
        )

    done = sealed.provider(body)
    assert done.output.count("No such file") == 4
    assert done.output.endswith("0\n")


def test_a_fork_bomb_is_contained_and_the_sandbox_usable(sealed: Any) -> None:
    async def body(sandbox: Any) -> Any:
        bomb = asyncio.ensure_future(sandbox.exec(BOMB + " sleep 2", timeout_s=1.5))
        peak = 0
        while not bomb.done():
            peak = max(peak, len(children(sandbox.pid, is_deep=True)))
            await asyncio.sleep(0.05)
        await sandbox.stop_processes()
        return peak, await sandbox.exec("echo alive; ps ax | wc -l", timeout_s=30)

    peak, after = sealed.set(processes=32).run(body)
    assert peak < 500
    assert after.output == "alive\n5\n"


def test_too_many_processes_end_the_command_and_say_so(sealed: Any) -> None:
    done = sealed.set(processes=20).sh("for i in $(seq 60); do sleep 30 & done; sleep 30")
    assert not done.timed_out
    assert "more than 20 processes" in done.output or "fork" in done.output


def test_bytes_written_in_all_are_bounded(bubble: Any) -> None:
    loop = "for f in /tmp/a ~/b /testbed/c /dev/shm/d; do head -c 10000000 /dev/zero > $f; done"
    done = bubble.set(disk_mb=16).sh(loop + "; du -cb /tmp ~ /testbed/c /dev/shm | tail -1")
    assert "No space left on device" in done.output
    assert int(done.output.split()[-2]) <= 16 << 20


def test_files_are_bounded_though_they_are_empty(bubble: Any) -> None:
    """Each takes about a KiB of the kernel's memory, which no other bound counts."""
    program = "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'x').close()"
    done = bubble.set(disk_mb=4).sh(f'python3 -c "{program}"; ls /tmp | wc -l')
    assert "No space left on device" in done.output
    assert int(done.output.split()[-1]) <= 4 << 10


def test_shared_memory_is_bounded(sealed: Any) -> None:
    loop = "for f in 1 2 3; do head -c 50000000 /dev/zero > /dev/shm/$f; done"
    done = sealed.set(disk_mb=64).sh(loop + "; du -cb /dev/shm | tail -1")
    assert "No space left on device" in done.output
    assert int(done.output.split()[-2]) <= 65 << 20


def test_git_works_on_the_testbed(bubble: Any) -> None:
    done = bubble.sh(
        "git init -q && git add -A && git commit -qm x && git status --short && git log"
    )
    assert done.exit_code == 0, done.output
