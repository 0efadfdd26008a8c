"""What a server of a given version can do: the one place that knows SGLang's drift."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from agentrl.errors import VersionError

log = logging.getLogger(__name__)
EMBEDDED = "embedded-"
OLDEST = (0, 5, 15)
NEWEST = (0, 5, 23)
"""The newest whose wheel was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    name: str
    has_spans: bool
    """meta_info.weight_versions tells which tokens came from which version."""
    has_update_brackets: bool
    """/begin_weight_update and /end_weight_update must surround a collective update."""
    can_flush_retracted: bool
    """A flush works while paused with mode retract; where not, the refusal ends the scheduler."""
    checksum: str
    """`equal`: /weights_checker answers `tensor_checksum`. `own`: hashes of its own, which
    only say whether the weights changed."""

    def pause_mode(self, wanted: str) -> str:
        """Return the mode that keeps tokens and versions apart.

        Without spans a request that lives through an update would label all its tokens as new;
        where a retracted request blocks the flush, the update would fail. Both are mended by
        `abort`: the client goes on from the partial answer.
        """
        is_safe = self.has_spans and (wanted != "retract" or self.can_flush_retracted)
        return wanted if is_safe else "abort"


_EMBEDDED = Capabilities(
    name="embedded",
    has_spans=True,
    has_update_brackets=True,
    can_flush_retracted=True,
    checksum="equal",
)
# Lower bounds, from reading each wheel; a version between two rows behaves as the lower one.
_SGLANG: dict[tuple[int, int, int], Capabilities] = {
    (0, 5, 15): Capabilities(
        name="sglang 0.5.15",
        has_spans=False,
        has_update_brackets=False,
        can_flush_retracted=False,
        checksum="own",
    ),
    (0, 5, 20): Capabilities(
        name="sglang 0.5.20",
        has_spans=True,
        has_update_brackets=False,
        can_flush_retracted=False,
        checksum="own",
    ),
    (0, 5, 22): Capabilities(
        name="sglang 0.5.22",
        has_spans=True,
        has_update_brackets=True,
        can_flush_retracted=True,
        checksum="own",
    ),
}


def capabilities(version: str) -> Capabilities:
    """Return what the server that calls itself `version` can do. Raises VersionError.

    A version newer than the table, or none that can be read (a build from source calls itself
    0.0.0), is taken for the newest row, with a warning.
    """
    if version.startswith(EMBEDDED):
        return _EMBEDDED
    number = _number(version)
    if (0, 0, 0) < number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VersionError(
            f"engine of version {version!r}: must be sglang {oldest} or newer, or the embedded one"
        )
    if number > NEWEST or number == (0, 0, 0):
        newest = _SGLANG[max(_SGLANG)]
        log.warning("sglang %s is not in our table: taken for %s", version or "?", newest.name)
        return newest
    return _SGLANG[max(key for key in _SGLANG if key <= number)]


def _number(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
