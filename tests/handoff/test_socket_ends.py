"""Groups over a socket when an end of it dies, is full, is slow or is another."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from socket_toys import (
    HEADER,
    ListedEvents,
    attempt_of,
    bytes_of,
    client,
    draws,
    process,
    receiver,
    send,
    sender,
    until,
)
from test_spool import group

from agentrl.errors import HandoffError, PublishError, WaitTimeout
from agentrl.handoff.publish import publish_json
from agentrl.handoff.socket_wire import Parcel, endpoint_file, find_endpoint
from agentrl.handoff.spool import list_spool, read_group

# Ends that die


pytestmark = pytest.mark.slow  # workers in processes of their own


def test_a_trainer_killed_between_the_write_and_its_answer_gets_the_group_again(odd_path):
    async def run():
        async with sender(odd_path) as end:
            with process(odd_path, "dies") as killed:
                writing = asyncio.create_task(end.write(group(1)))
                await until(lambda: killed.poll() is not None)
            assert (killed.returncode, end.waiting) == (-signal.SIGKILL, [1])
            with receiver(odd_path) as second:
                await writing
            return second.received, end.connections

    received, connections = asyncio.run(run())
    assert (received, draws(odd_path)) == (0, [1])
    assert connections >= 2


def test_groups_wait_for_a_trainer_that_restarts(odd_path):
    async def run():
        async with sender(odd_path) as end:
            with process(odd_path) as first:
                await end.write(group(0))
                first.kill()
                first.wait()
            writing = [asyncio.create_task(end.write(group(draw, 1))) for draw in (1, 2, 3)]
            await until(lambda: end.waiting == [1, 2, 3])
            with receiver(odd_path):
                await asyncio.gather(*writing)

    asyncio.run(run())
    assert draws(odd_path) == [0, 1, 2, 3]


def test_a_killed_worker_leaves_whole_groups_only_and_others_go_on(odd_path):
    code = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from socket_toys import send; from test_spool import group\n"
        "for first in range(0, 5000, 10):\n"
        "    send(Path(sys.argv[1]), *(group(draw, 8) for draw in range(first, first + 10)))\n"
    )
    with receiver(odd_path) as end:
        worker = subprocess.Popen([sys.executable, "-c", code, odd_path])
        asyncio.run(until(lambda: end.received >= 3))
        worker.kill()
        worker.wait()
        send(odd_path, group(9000))
    assert end.received == len(draws(odd_path)) < 5000
    assert all(read_group(path) for path in list_spool(odd_path / "spool").values())


def test_a_group_that_cannot_be_written_is_not_acknowledged_and_ends_the_trainer(odd_path):
    (odd_path / "spool").mkdir()
    in_the_way = odd_path / "spool" / "3"  # a file in the folder's place fails even for root
    in_the_way.write_text("")

    async def run():
        async with sender(odd_path) as end:
            with receiver(odd_path) as first:
                writing = asyncio.create_task(end.write(group(1)))
                await until(lambda: first._failure is not None)
                with pytest.raises(PublishError, match=r"draw 1 .*00000001\.parquet could not be"):
                    first.check()
            assert end.waiting == [1]
            in_the_way.unlink()
            with receiver(odd_path):
                await writing

    asyncio.run(run())
    assert draws(odd_path) == [1]


def test_a_full_disk_is_named(odd_path):
    disk = odd_path / "spool"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        with receiver(odd_path) as end, client(odd_path) as one:
            for draw in range(100):
                header = Parcel(**(HEADER | {"draw": draw}))
                one.send_multipart([msgspec.json.encode(header), bytes_of(group(draw, 8))])
            asyncio.run(until(lambda: end._failure is not None))
        with pytest.raises(PublishError, match="No space left on device"):
            end.check()
        assert 0 < end.received < 100
        assert all(read_group(path) for path in list_spool(disk).values())
    finally:
        subprocess.run(["umount", disk], check=True)


# Back-pressure and the end


def test_a_trainer_that_takes_nothing_fills_the_sender_and_a_taking_one_empties_it(odd_path):
    async def run():
        async with sender(odd_path, high_water=8) as end:
            with process(odd_path) as slow:
                await end.write(group(0))
                slow.send_signal(signal.SIGSTOP)
                writing = [asyncio.create_task(end.write(group(draw, 1))) for draw in range(1, 9)]
                await until(lambda: end.is_full)
                assert end.waiting == list(range(1, 9))
                slow.send_signal(signal.SIGCONT)
                await asyncio.gather(*writing)
                assert not end.is_full

    asyncio.run(run())
    assert draws(odd_path) == list(range(9))


def test_waiting_groups_hold_no_thread_of_the_event_loops(odd_path):
    async def run():
        async with sender(odd_path) as end:
            writing = [asyncio.create_task(end.write(group(draw, 1))) for draw in range(60)]
            await until(lambda: len(end.waiting) == 60)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 30) == 1
            for one in writing:
                one.cancel()

    asyncio.run(run())


def test_the_end_waits_for_what_a_living_trainer_can_still_take(odd_path):
    async def run():
        async with sender(odd_path, flush_s=60.0) as end:
            writing = asyncio.create_task(end.write(group(1)))
            await until(lambda: end.waiting == [1])
            writing.cancel()
            opened = receiver(odd_path)
            await asyncio.to_thread(opened.__enter__)
        return opened, end

    opened, end = asyncio.run(run())
    opened.__exit__()
    assert (draws(odd_path), end.events.all) == ([1], [])


def test_groups_that_no_trainer_takes_are_counted_at_the_end(odd_path):
    events = ListedEvents()

    async def run():
        async with sender(odd_path, events=events, flush_s=0.1) as end:
            writing = [asyncio.create_task(end.write(group(draw, 1))) for draw in (4, 9)]
            await until(lambda: end.waiting == [4, 9])
            for one in writing:
                one.cancel()

    asyncio.run(run())
    assert [(one.what, one.reason, one.draw) for one in events.all] == [
        ("group", "unsent", 4),
        ("group", "unsent", 9),
    ]


def test_the_end_does_not_wait_for_a_trainer_that_has_left(odd_path):
    async def run():
        async with sender(odd_path, flush_s=600.0) as end:
            with receiver(odd_path):
                await end.write(group(1))
            writing = asyncio.create_task(end.write(group(2)))
            await until(lambda: end.waiting == [2])
            writing.cancel()

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 60


# Where the trainer is


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"run": "other"}])
def test_an_endpoint_of_an_older_attempt_is_ignored(odd_path, changes):
    old = {"run": "demo", "attempt": 2, "url": "tcp://127.0.0.1:1", "id": "a", "pid": 1, "host": ""}
    publish_json(endpoint_file(attempt_of(odd_path, 2)), old | changes)
    assert find_endpoint(attempt_of(odd_path, 2), run="demo", attempt=2) is None


def test_without_a_trainer_the_wait_ends_and_names_the_file(odd_path):
    with pytest.raises(WaitTimeout, match=r"trainer-0\.json names no trainer of this attempt"):
        send(odd_path, group(1), limit_s=0.2)


def test_a_broken_endpoint_file_is_named(odd_path):
    publish_json(endpoint_file(attempt_of(odd_path)), {"url": 3})
    with pytest.raises(HandoffError, match=r"trainer-0\.json: not a Endpoint"):
        send(odd_path, group(1))
