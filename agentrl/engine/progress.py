"""Whether an engine still gets on with its work: pure, from samples that somebody takes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What /v1/loads says, summed over data-parallel ranks."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    mark: tuple[float, ...] = ()
    """Whatever changes when the engine computes: its clock, its counters."""


PAUSED_LIMITS = 3
"""Limits that a paused engine may stay silent for: it may be loading weights."""


@dataclass(slots=True)
class Progress:
    """Adds up the time in which an engine had work and gave no sign of progress.

    SGLang answers /v1/loads from shared memory even while its scheduler hangs, so an answer is no
    sign: a changed mark is, and so is a generate probe that came back. An interval counts at most
    `interval_cap_s`: a longer one says that we were not running, or that the whole node stood
    still, and is no fault of the engine.
    """

    limit_s: float
    interval_cap_s: float
    stalled_s: float = 0.0
    longest_s: float = 0.0
    """Longest stall that ended by itself."""
    _mark: tuple[float, ...] = ()
    _at: float | None = None
    _has_probe: bool = field(default=False)

    def sample(self, at: float, load: Load | None) -> bool:
        """Take a sample (None: no answer came) at `at` seconds; return whether it hangs."""
        passed = self._passed(at)
        if load is not None:
            has_moved, self._mark = load.mark != self._mark, load.mark
            is_idle = not (load.running or load.waiting or self._has_probe)
            if has_moved or is_idle:
                self._moved()
                return False
        self.stalled_s += passed
        return self.stalled_s >= self.limit_s

    def sample_paused(self, at: float, load: Load | None) -> bool:
        """Take a sample of a paused engine: it need not move, but its port has to answer."""
        passed = self._passed(at)
        if load is not None:
            self.excuse()
            return False
        self.stalled_s += passed
        return self.stalled_s >= PAUSED_LIMITS * self.limit_s

    def probe(self) -> None:
        """A generate probe was sent: from now on there is work."""
        self._has_probe = True

    def probed(self, *, is_ok: bool) -> None:
        """The probe ended; one that passed through the whole engine is a sign of progress."""
        self._has_probe = False
        if is_ok:
            self._moved()

    def excuse(self) -> None:
        """Forget the stall: the engine was paused, or is compiling."""
        self.stalled_s = 0.0

    def _passed(self, at: float) -> float:
        passed = 0.0 if self._at is None else min(max(at - self._at, 0.0), self.interval_cap_s)
        self._at = at
        return passed

    def _moved(self) -> None:
        self.longest_s = max(self.longest_s, self.stalled_s)
        self.stalled_s = 0.0
