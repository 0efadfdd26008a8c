"""Groups over a socket: what arrives, and what is refused and counted."""

import asyncio
import contextlib
import socket
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from socket_toys import (
    HEADER,
    ask,
    attempt_of,
    bytes_of,
    client,
    draws,
    receiver,
    send,
    sender,
    until,
)
from test_spool import group

from agentrl.errors import HandoffError, WaitTimeout
from agentrl.events import Drop
from agentrl.handoff.socket_keys import FILE, Keys, Pair
from agentrl.handoff.socket_keys import read as read_keys
from agentrl.handoff.socket_keys import write as write_keys
from agentrl.handoff.socket_wire import Parcel, endpoint_file, find_endpoint
from agentrl.handoff.spool import list_spool, read_group

# Groups arrive


def test_the_bytes_in_the_spool_are_those_that_files_would_have_written(odd_path):
    with receiver(odd_path) as end:
        send(odd_path, group(42))
    path = odd_path / "spool" / "3" / "00000042.parquet"
    assert path.read_bytes() == bytes_of(group(42))
    assert (end.received, end.refused) == (1, {})


def test_workers_of_several_nodes_send_at_once(odd_path):
    async def run():
        async with contextlib.AsyncExitStack() as stack:
            ends = [await stack.enter_async_context(sender(odd_path, node=n)) for n in (0, 0, 1)]
            made = [group(draw, 1) for draw in range(30)]
            await asyncio.gather(*(ends[one.draw % 3].write(one) for one in made))

    with receiver(odd_path):
        asyncio.run(run())
    assert draws(odd_path) == list(range(30))
    assert [path.parent.name for path in list_spool(odd_path / "spool").values()][:3] == [*"001"]


def test_a_group_that_comes_again_is_acknowledged_and_written_once(odd_path):
    with receiver(odd_path) as end:
        send(odd_path, group(1))
        send(odd_path, group(1, attempts=1))
    assert end.received == 1
    assert read_group(list_spool(odd_path / "spool")[1]) == group(1)


def test_a_draw_that_is_consumed_or_waits_from_before_is_not_written_again(odd_path):
    with receiver(odd_path):
        send(odd_path, group(1))
    with receiver(odd_path, consumed={2: "trained"}) as end:
        send(odd_path, group(1), group(2))
    assert (end.received, draws(odd_path)) == (0, [1])


def test_it_listens_on_the_given_address_only(odd_path):
    with receiver(odd_path, address="127.0.0.2"):
        endpoint = find_endpoint(attempt_of(odd_path), run="demo", attempt=1)
        assert endpoint.url.startswith("tcp://127.0.0.2:")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(endpoint.url.rpartition(":")[2])))
        send(odd_path, group(1))


def test_nothing_outlives_the_block(odd_path):
    before = threading.active_count()
    with receiver(odd_path):
        send(odd_path, group(1))
    assert threading.active_count() == before
    assert not endpoint_file(attempt_of(odd_path)).exists()


# What is refused, and counted


def reasons(events):
    return [(one.what, one.reason) for one in events.all if isinstance(one, Drop)]


def test_another_attempts_key_opens_nothing(odd_path):
    with receiver(odd_path) as end:
        trainer = read_keys(attempt_of(odd_path) / FILE).trainer
        with client(odd_path, keys=Keys(trainer=trainer, worker=Pair.make())) as one:
            one.send_multipart([b"{}", b""])
            asyncio.run(until(lambda: end.refused["unknown_key"]))
        assert draws(odd_path) == []
    assert ("connection", "unknown_key") in reasons(end.events)


def test_a_worker_whose_key_is_refused_says_so_when_its_time_is_up(odd_path):
    with receiver(odd_path) as end:
        write_keys(attempt_of(odd_path) / FILE, Keys.make())
        with pytest.raises(
            WaitTimeout, match=r"1 groups of node 3 wait.*refuses this worker's key"
        ):
            send(odd_path, group(1), limit_s=1.0)
        assert end.refused["no_handshake"] > 0
    assert draws(odd_path) == []


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, bytes(64), b""])
def test_garbage_is_counted_and_disturbs_nobody(odd_path, junk):
    with receiver(odd_path) as end:
        url = find_endpoint(attempt_of(odd_path), run="demo", attempt=1).url
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(junk)
        asyncio.run(until(lambda: end.refused["no_handshake"] == 1))
        send(odd_path, group(1))
    assert draws(odd_path) == [1]
    assert reasons(end.events) == [("connection", "no_handshake")]


def test_many_refusals_of_one_kind_make_few_events(odd_path):
    with receiver(odd_path) as end:
        url = find_endpoint(attempt_of(odd_path), run="demo", attempt=1).url
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        for _ in range(50):
            socket.create_connection((host, int(port))).close()
        asyncio.run(until(lambda: end.refused["no_handshake"] == 50))
    assert sum(one.count for one in end.events.all) == 50
    assert len(end.events.all) < 25


@pytest.mark.parametrize(
    ("changes", "cut", "reason", "words"),
    [
        ({"attempt": 2}, None, "wrong_run", "attempt 2 of run 'demo', this is attempt 1"),
        ({"run": "other"}, None, "wrong_run", "run 'other'"),
        ({}, -9, "torn", "no whole Parquet file"),
        ({}, 0, "torn", "0 bytes"),
    ],
)
def test_what_is_not_a_whole_group_of_this_attempt_is_refused(
    odd_path, changes, cut, reason, words
):
    with receiver(odd_path) as end, client(odd_path) as one:
        answer = ask(one, Parcel(**(HEADER | changes)), bytes_of(group(7))[:cut])
        assert (answer.draw, answer.refused) == (7, reason)
        assert words in answer.detail
    assert reasons(end.events) == [("group", reason)]
    assert draws(odd_path) == []


def test_a_changed_byte_is_refused(odd_path):
    data = bytearray(bytes_of(group(7)))
    data[100] ^= 1
    with receiver(odd_path), client(odd_path) as one:
        assert ask(one, Parcel(**HEADER), bytes(data)).refused == "torn"


def test_a_group_over_the_limit_is_refused_by_either_end(odd_path):
    with receiver(odd_path, max_bytes=2000) as end:
        with pytest.raises(
            HandoffError, match=r"draw 1: the trainer refused it: too_large: .*2000"
        ):
            send(odd_path, group(1))
        with pytest.raises(HandoffError, match=r"draw 1: its group is .* a socket takes 2000"):
            send(odd_path, group(1), max_bytes=2000)
    # the second sender leaves before it has shaken hands: its connection may be counted too
    groups = [one for one in reasons(end.events) if one[0] == "group"]
    assert groups == [("group", "too_large")]


frames = st.lists(st.one_of(st.binary(max_size=80), st.just(b"{}")), min_size=1, max_size=4)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(frames, min_size=1, max_size=5))
def test_no_message_ends_the_receiver(odd_path, messages):
    with receiver(odd_path) as end, client(odd_path) as one:
        for message in messages:
            one.send_multipart(message)
        assert ask(one, Parcel(**HEADER), bytes_of(group(7))).refused == ""
        assert end.refused == {"malformed": len(messages)}


@pytest.mark.parametrize("field", ["node", "draw"])
def test_a_message_cannot_name_a_place_outside_the_spool(odd_path, field):
    with receiver(odd_path) as end, client(odd_path) as one:
        for value in (-1, "../../x"):
            header = {**HEADER, field: value}
            one.send_multipart([str(header).replace("'", '"').encode(), bytes_of(group(7))])
        asyncio.run(until(lambda: end.refused["malformed"] == 2))
    assert draws(odd_path) == []
