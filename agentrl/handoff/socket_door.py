"""Who may connect to the trainer's socket, and how many were turned away.

libzmq asks by ZAP (https://rfc.zeromq.org/spec/27) whether a key is known, and tells by a monitor
socket what became of each connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from agentrl.handoff.socket_keys import Keys
from agentrl.handoff.socket_wire import HEARTBEAT_MS, LOST_MS

ZAP = "inproc://zeromq.zap.01"
UNKNOWN_KEY, NO_HANDSHAKE = "unknown_key", "no_handshake"
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILURES


@dataclass(kw_only=True, slots=True)
class Connections:
    """Tells from libzmq's events, of which only two name the connection, who came to nothing."""

    _at: dict[int, int] = field(default_factory=dict)
    """By descriptor, how many handshakes had succeeded when it was accepted."""
    _succeeded: int = 0
    _failure: str = ""
    """Of the event before; libzmq tells a connection's end right behind its failure."""

    def see(self, event: int, value: int) -> str:
        """Return why a connection was turned away, or nothing.

        One that ends without any word, since it spoke no ZeroMQ, is missed if another one's
        handshake succeeded meanwhile.
        """
        failure, self._failure = self._failure, ""
        if event == zmq.EVENT_ACCEPTED:
            self._at[value] = self._succeeded
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._succeeded += 1
        elif event & FAILURES:
            is_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._failure = UNKNOWN_KEY if is_key else NO_HANDSHAKE
        elif self._at.pop(value, -1) == self._succeeded and not failure:
            return NO_HANDSHAKE
        return failure if event == zmq.EVENT_DISCONNECTED else ""


class Door:
    """The bound socket, which lets in holders of the attempt's worker key only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, address: str) -> None:
        self._allowed = z85.decode(keys.worker.public)
        self._connections = Connections()
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey = keys.trainer.public.encode()
        self.socket.curve_secretkey = keys.trainer.secret.encode()
        self.socket.zap_domain = b"agentrl"
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = LOST_MS
        self._monitor = self.socket.get_monitor_socket(WATCHED)
        self.socket.ipv6 = ":" in address
        self.socket.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def register(self, poller: zmq.Poller) -> None:
        for one in (self._zap, self._monitor, self.socket):
            poller.register(one, zmq.POLLIN)

    def keep(self) -> list[str]:
        """Answer who asks to come in; return the reasons of those turned away since."""
        while self._zap.poll(0):
            self._answer(self._zap.recv_multipart())
        reasons = []
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            reasons.append(self._connections.see(int(told["event"]), told["value"]))
        return [reason for reason in reasons if reason]

    def _answer(self, asked: list[bytes]) -> None:
        version, request, *_, mechanism, key = asked
        known = mechanism == b"CURVE" and key == self._allowed
        verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._zap.send_multipart([version, request, *verdict, b"", b""])

    def close(self) -> None:
        for one in (self._zap, self._monitor):
            one.close(linger=0)
        self.socket.close(linger=1000)  # the last answers
