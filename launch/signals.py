"""Signals and the stop file: they only set a flag, which is polled where it is safe to save."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from agentrl.events import Signal, Writer, now

ASK_TO_STOP = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_FILE_POLL_S = 0.5


class StopFlag:
    """Whether somebody asked for the end: USR2, TERM, INT, HUP, or the run's stop file.

    As a context manager it gives the signals back at the end; `install` alone keeps them.

    Calling it is cheap; it bears signals that come twice. `cause` is `USR2`, `STOP`, …
    """

    def __init__(self, stop_file: Path | None = None, events: Writer | None = None) -> None:
        self.cause = ""
        self.count = 0
        self._stop_file = stop_file
        self._events = events
        self._is_told = False
        self._next_look = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> StopFlag:
        """Take the signals over; main thread only."""
        for number in ASK_TO_STOP:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup asked for that
            self._before[number] = signal.signal(number, self._came)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one that came earlier
        return self

    def __enter__(self) -> StopFlag:
        return self.install()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        if not self.cause and self._is_file_there():
            self.cause = "STOP"
            self.count += 1
        if self.cause and not self._is_told:
            self._is_told = True
            if self._events is not None:
                self._events.write(
                    Signal(
                        name=self.cause, action="stop at the next boundary", start=now(), end=now()
                    )
                )
        return bool(self.cause)

    def reset(self) -> None:
        """Forget a request that has been met."""
        self.cause, self.count, self._is_told = "", 0, False

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.cause = self.cause or signal.Signals(number).name.removeprefix("SIG")
        self.count += 1

    def _is_file_there(self) -> bool:
        """Look at most twice a second, by listing: network filesystems cache failed look-ups."""
        if self._stop_file is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + STOP_FILE_POLL_S
        return any(path.name == self._stop_file.name for path in self._stop_file.parent.iterdir())
