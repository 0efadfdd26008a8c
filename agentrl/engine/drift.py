"""Which engine samples other than its weights say: pure, from gaps to the trainer.

A faulty GPU or driver can corrupt results without an error (ROCm 7.2 did). The trainer computes
anew what an engine said of its own tokens; an engine whose gap stands out among its siblings is
taken to be corrupt. With one engine its own past stands in for siblings.

What is compared are draws, not sequences: the attempts at one task are alike, and where the policy
has moved on since they were sampled, their gap is that task's and that step's more than the
engine's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEWEST = 16
"""Sequences of an engine that are judged, or more: until they are of FEWEST_DRAWS draws."""
FEWEST = 8
"""Sequences without which nothing is said of an engine."""
FEWEST_DRAWS = 12
"""Draws without which nothing is said, of the engine as of those it is compared with. With 6, gaps
that vary by a factor of 3 from step to step accused an engine in one of ten simulated runs."""
TIMES = 4.0
"""Below so many times the others' gap an engine never stands out, however alike they are."""
FLOOR = 0.05
"""Nats: engines in bfloat16 are up to 0.02 apart from the trainer by rounding (one H200)."""
SPREAD_OF_MAD = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""


class Gap(NamedTuple):
    """What one sequence says of the engine that sampled it."""

    step: int
    """Of the trainer, when it was trained on."""
    draw: int
    nats: float
    """Mean |trainer − engine| of its tokens."""


def outliers(gaps: Mapping[str, Sequence[Gap]], *, max_drift: float) -> dict[str, str]:
    """Return the engines that stand out, with the reason.

    gaps: by engine, oldest first; one that is not finite is a sign of corruption by itself. An
    engine stands out when the median of its newest draws is `max_drift` deviations over the median
    of the others' draws of the same steps, TIMES that median, and over FLOOR. At most half of the
    engines are named: when most stand out, it is not they that are at fault.
    """
    found = {name: why for name in gaps if (why := _judge(name, gaps, max_drift))}
    return found if len(found) * 2 <= max(len(gaps), 2) else {}


def _judge(name: str, gaps: Mapping[str, Sequence[Gap]], max_drift: float) -> str:
    if not all(np.isfinite(gap.nats) for gap in gaps[name][-NEWEST:]):
        return "its log-probabilities are not numbers"
    newest = _newest(gaps[name])
    if not newest:
        return ""
    if len(gaps) == 1:
        others = list(gaps[name][: -len(newest)])
    else:
        of_others = (gap for other, found in gaps.items() if other != name for gap in found)
        others = [gap for gap in of_others if gap.step >= newest[0].step]
    theirs = _by_draw(others)
    if len(theirs) < FEWEST_DRAWS:
        return ""
    center, mine = float(np.median(theirs)), float(np.median(_by_draw(newest)))
    spread = SPREAD_OF_MAD * float(np.median(np.abs(theirs - center)))
    limit = max(center + max_drift * spread, TIMES * center, FLOOR)
    if mine <= limit:
        return ""
    return (
        f"its log-probabilities are {mine:.3f} nats a token from the trainer's, the others' "
        f"{center:.3f} (limit {limit:.3f}, engine.max_drift={max_drift:g})"
    )


def _newest(gaps: Sequence[Gap]) -> Sequence[Gap]:
    """Return the shortest end that is enough to judge an engine by; empty where nothing is."""
    draws: set[int] = set()
    for count, gap in enumerate(reversed(gaps), 1):
        draws.add(gap.draw)
        if count >= NEWEST and len(draws) >= FEWEST_DRAWS:
            return gaps[-count:]
    return gaps if len(gaps) >= FEWEST and len(draws) >= FEWEST_DRAWS else ()


def _by_draw(gaps: Iterable[Gap]) -> NDArray[np.float64]:
    """Return the mean of each draw, without what is not finite."""
    found: dict[int, list[float]] = defaultdict(list)
    for gap in gaps:
        if np.isfinite(gap.nats):
            found[gap.draw].append(gap.nats)
    return np.asarray([np.mean(one) for one in found.values()], dtype=np.float64)
