import os
import stat

import pytest
import zmq

from agentrl.errors import HandoffError
from agentrl.handoff.socket_door import NO_HANDSHAKE, UNKNOWN_KEY, Connections
from agentrl.handoff.socket_keys import FILE, Keys, obtain, read, write


@pytest.fixture
def path(odd_path):
    obtain(odd_path)
    return odd_path / FILE


def test_a_restarted_trainer_finds_the_keys_of_its_attempt(odd_path):
    assert obtain(odd_path / "0001") == obtain(odd_path / "0001")
    assert obtain(odd_path / "0002") != obtain(odd_path / "0001")


def test_only_the_owner_may_read_them_whatever_the_umask_is(odd_path):
    before = os.umask(0)
    try:
        write(odd_path / FILE, Keys.make())
    finally:
        os.umask(before)
    assert stat.S_IMODE((odd_path / FILE).stat().st_mode) == 0o600
    assert os.listdir(odd_path) == [FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o700])
def test_a_looser_mode_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(HandoffError, match=f"mode is {mode:04o}, must be 0600"):
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(path):
    os.chown(path, 12345, 12345)
    with pytest.raises(HandoffError, match="owned by user 12345, this is user 0"):
        read(path)


def test_a_link_is_not_followed(path):
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(HandoffError, match="symbolic links"):
        read(link)


def test_a_missing_file_is_named(odd_path):
    with pytest.raises(HandoffError, match=r"handoff\.key: No such file .* the trainer makes"):
        read(odd_path / FILE)


@pytest.mark.parametrize("junk", [b"", b"{}", b'{"trainer": {"public": "a", "secret": "b"}}'])
def test_a_file_that_holds_no_keys_is_refused(path, junk):
    path.write_bytes(junk)
    with pytest.raises(HandoffError, match="not what a trainer writes"):
        read(path)


def test_secrets_are_not_shown():
    keys = Keys.make()
    assert keys.trainer.public in repr(keys)
    assert keys.trainer.secret not in repr(keys)
    assert keys.worker.secret not in repr(keys)


# What became of connections, from libzmq's events alone

ACCEPTED, GOOD, ENDED = (
    zmq.EVENT_ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_DISCONNECTED,
)
BAD_KEY, BAD = zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@pytest.mark.parametrize(
    ("told", "reasons"),
    [
        ([(ACCEPTED, 5), (GOOD, 0), (ENDED, 5)], []),
        ([(ACCEPTED, 5), (BAD_KEY, 400), (ENDED, 5)], [UNKNOWN_KEY]),
        ([(ACCEPTED, 5), (BAD, 1), (ENDED, 5)], [NO_HANDSHAKE]),
        ([(ACCEPTED, 5), (ENDED, 5)], [NO_HANDSHAKE]),
        ([(ACCEPTED, 5), (GOOD, 0), (ACCEPTED, 6), (ENDED, 6), (ENDED, 5)], [NO_HANDSHAKE]),
        (
            [(ACCEPTED, 5), (ACCEPTED, 6), (BAD, 1), (ENDED, 6), (GOOD, 0), (ENDED, 5)],
            [NO_HANDSHAKE],
        ),
    ],
)
def test_each_connection_that_came_to_nothing_is_counted_once(told, reasons):
    seen = Connections()
    found = [seen.see(event, value) for event, value in told]
    assert [reason for reason in found if reason] == reasons
