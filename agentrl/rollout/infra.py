"""When infrastructure failures are so many that training on would waste the machines."""

from __future__ import annotations

from collections import Counter, deque

from agentrl.errors import TooManyInfraFailures
from agentrl.rollout.outcome import RULES


class InfraWindow:
    """The newest tries of one process; raises once too many of them failed for causes of ours."""

    def __init__(self, *, window: int, max_rate: float) -> None:
        self._causes: deque[str] = deque(maxlen=window)
        self._last_error: dict[str, str] = {}
        self._max_rate = max_rate

    def record(self, cause: str, error: str = "") -> None:
        """Count one try. Raises TooManyInfraFailures once a full window is over the rate."""
        if cause == "cancelled":
            return
        self._causes.append(cause)
        if error:
            self._last_error[cause] = error
        if len(self._causes) == self._causes.maxlen and self.rate > self._max_rate:
            raise TooManyInfraFailures(self.table())

    @property
    def rate(self) -> float:
        """Share of the window's tries that failed for causes of ours; 0.0 before the first."""
        failed = sum(not RULES[cause].is_graded for cause in self._causes)
        return failed / len(self._causes) if self._causes else 0.0

    def table(self) -> str:
        """Return cause, count, share and last error as lines for a person."""
        total = len(self._causes)
        lines = [
            f"{self.rate:.0%} of the newest {total} tries failed for causes that the policy cannot "
            f"have (rollout.max_infra_rate={self._max_rate:.0%}). Mend the first row, then resume.",
            f"{'cause':14s} {'count':>5s} {'share':>6s}  last error",
        ]
        for cause, count in Counter(self._causes).most_common():
            if not RULES[cause].is_graded:
                error = " ".join(self._last_error.get(cause, "").split())[:200]
                lines.append(f"{cause:14s} {count:5d} {count / total:6.0%}  {error}")
        return "\n".join(lines)
