"""How long to wait before asking a service again that has refused for now."""

from __future__ import annotations

import random

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0


def wait_s(attempt: int, draw: float) -> float:
    """Return how long to wait before attempt 1, 2, …; draw: 0 to 1, at random.

    Doubles, and is spread over its upper half so that the refused do not come back together.
    """
    longest = min(FIRST_WAIT_S * 2.0 ** (attempt - 1), LONGEST_WAIT_S)
    return longest * (0.5 + 0.5 * draw)


def random_wait_s(attempt: int) -> float:
    return wait_s(attempt, random.random())
