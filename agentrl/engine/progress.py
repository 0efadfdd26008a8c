"""Whether an engine still gets on with its work: pure, from samples that somebody takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Finding = Literal["", "hang", "unresponsive"]
"""Empty: nothing is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What /v1/loads says, summed over data-parallel ranks."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    mark: tuple[float, ...] = ()
    """Whatever changes when the engine computes: its clock, its counters."""

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)


PAUSED_LIMITS = 3
"""Limits that a paused engine may stay silent for: it may be loading weights."""
TICKS = 4
"""Samples in a row that moved without work: such a mark is a clock, as SGLang's is, and one that
stands still is a sign."""

STREAM_TOKENS = 50
"""Of a reply that a scheduler hands on at the latest, be it that nobody reads a stream."""


@dataclass(slots=True)
class Delivery:
    """Whether the tokens that a scheduler computes come out of its server.

    SGLang's detokenizer stands between the two. While other requests run, its scheduler answers a
    probe past that, so only the port's own count of tokens shows that it stopped. No clock is
    needed: what a scrape counts as computed was computed before the port counted.
    """

    _delivered: float = 0.0
    _passes: float = 0.0
    _unchanged: int = 0

    def sample(self, *, passes: float, delivered: float) -> bool:
        """Take a scrape's counts of decode passes and of tokens at the port; True: they stop there.

        A delivered count of 0 is one that the server does not keep. Two intervals leave time for
        what is under way, and twice the tokens of the longest gap for what ended meanwhile.
        """
        if delivered != self._delivered or not delivered:
            self._delivered, self._passes, self._unchanged = delivered, passes, 0
            return False
        self._unchanged += 1
        return self._unchanged >= 2 and passes - self._passes >= 2 * STREAM_TOKENS


@dataclass(slots=True)
class Progress:
    """Adds up the time in which an engine had work and gave no sign of progress.

    SGLang answers /v1/loads from shared memory even while its scheduler hangs, so an answer is no
    sign: a changed mark is, and so is a generate probe that came back. But a mark that moves while
    nothing runs or waits, and a probe that is not answered all the while, say that the scheduler
    has done its part and that what carries answers out of the engine has not. An interval counts
    at most `interval_cap_s`: a longer one says that we were not running, or that the whole node
    stood still, and is no fault of the engine.
    """

    limit_s: float
    interval_cap_s: float
    answer_s: float
    """Longest that a probe may take where nothing else is asked of an engine that moves."""
    stalled_s: float = 0.0
    longest_s: float = 0.0
    """Longest stall that ended by itself."""
    unanswered_s: float = 0.0
    """For which a probe is out, and a moving engine says that it has nothing to do."""
    _mark: tuple[float, ...] = ()
    _at: float | None = None
    _probed_at: float | None = None
    """When the probe that is out was sent."""
    _ticks: int = 0

    def sample(self, at: float, load: Load | None) -> Finding:
        """Take a sample (None: no answer came) at `at` seconds; return what it shows."""
        passed = self._passed(at)
        if load is None:
            self.stalled_s += passed
        else:
            has_moved, self._mark = load.mark != self._mark, load.mark
            self._count_stall(load, passed, has_moved=has_moved)
            self._count_unanswered(load, passed, has_moved=has_moved)
        if self.stalled_s >= self.limit_s:
            return "hang"
        return "unresponsive" if self.unanswered_s >= self.answer_s else ""

    def sample_paused(self, at: float, load: Load | None) -> Finding:
        """Take a sample of a paused engine: it need not move, but its port has to answer."""
        passed = self._passed(at)
        self._forget_probe()
        if load is not None:
            self.excuse()
            return ""
        self.stalled_s += passed
        return "hang" if self.stalled_s >= PAUSED_LIMITS * self.limit_s else ""

    def probe(self, at: float) -> None:
        """A generate probe was sent: from now on there is work."""
        self._probed_at, self.unanswered_s = at, 0.0

    def probed(self, *, is_ok: bool) -> None:
        """The probe ended; one that passed through the whole engine is a sign of progress."""
        self._forget_probe()
        if is_ok:
            if self.stalled_s:
                self._ticks = 0  # it stood still and was well: no clock
            self._moved()

    def excuse(self) -> None:
        """Forget the stall: the engine was paused, or is compiling."""
        self.stalled_s = 0.0

    def _count_stall(self, load: Load, passed: float, *, has_moved: bool) -> None:
        if has_moved:
            self._ticks += load.is_idle
            self._moved()
        elif load.is_idle and self._probed_at is None and self._ticks < TICKS:
            self._ticks = 0
            self._moved()
        else:
            self.stalled_s += passed

    def _count_unanswered(self, load: Load, passed: float, *, has_moved: bool) -> None:
        """A mark that stands still may be a long prompt that was just begun, so it does not count.

        Nor does time beside other work, in which a probe waits its turn.
        """
        if self._probed_at is not None and load.is_idle and has_moved:
            assert self._at is not None  # set with `passed`
            self.unanswered_s += min(passed, max(self._at - self._probed_at, 0.0))

    def _forget_probe(self) -> None:
        self._probed_at, self.unanswered_s = None, 0.0

    def _passed(self, at: float) -> float:
        passed = 0.0 if self._at is None else min(max(at - self._at, 0.0), self.interval_cap_s)
        self._at = at
        return passed

    def _moved(self) -> None:
        self.longest_s = max(self.longest_s, self.stalled_s)
        self.stalled_s = 0.0
