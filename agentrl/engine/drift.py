"""Which engine samples other than its weights say: pure, from gaps to the trainer.

A faulty GPU or driver can corrupt results without an error (ROCm 7.2 did). The trainer computes
anew what an engine said of its own tokens; an engine whose gap stands out among its siblings is
taken to be corrupt. With one engine its own past stands in for siblings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

NEWEST = 16
"""Sequences of an engine that are judged."""
FEWEST = 8
"""Sequences without which nothing is said, of the engine as of those it is compared with."""
FLOOR = 0.05
"""Nats: engines in bfloat16 are up to 0.02 apart from the trainer by rounding (one H200)."""
SPREAD_OF_MAD = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""


def outliers(gaps: Mapping[str, Sequence[float]], *, max_drift: float) -> dict[str, str]:
    """Return the engines that stand out, with the reason.

    gaps: by engine, mean |trainer − engine| of each sequence, nats a token, oldest first; one that
    is not finite is a sign of corruption by itself. An engine stands out when the median of its
    newest is both `max_drift` deviations over the others' median and twice that, and over FLOOR.
    At most half of the engines are named: when most stand out, it is not they that are at fault.
    """
    found = {name: why for name in gaps if (why := _judge(name, gaps, max_drift))}
    return found if len(found) * 2 <= max(len(gaps), 2) else {}


def _judge(name: str, gaps: Mapping[str, Sequence[float]], max_drift: float) -> str:
    mine = np.asarray(gaps[name][-NEWEST:], dtype=np.float64)
    if len(mine) and not np.isfinite(mine).all():
        return "its log-probabilities are not numbers"
    others = _finite([gap for other, found in gaps.items() if other != name for gap in found])
    if len(gaps) == 1:
        others = _finite(gaps[name][:-NEWEST])
    if len(mine) < FEWEST or len(others) < FEWEST:
        return ""
    center, newest = float(np.median(others)), float(np.median(mine))
    spread = SPREAD_OF_MAD * float(np.median(np.abs(others - center)))
    limit = max(center + max_drift * spread, 2 * center, FLOOR)
    if newest <= limit:
        return ""
    return (
        f"its log-probabilities are {newest:.3f} nats a token from the trainer's, the others' "
        f"{center:.3f} (limit {limit:.3f}, engine.max_drift={max_drift:g})"
    )


def _finite(values: Sequence[float]) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    return found[np.isfinite(found)]
