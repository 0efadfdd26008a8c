"""The E2B SDK: imported late, with its pools as wide as the run needs, and its errors told apart.

Its pools are sized from the environment when it is imported, so that has to be set before.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from agentrl.errors import SandboxUnavailable

POOL = "E2B_MAX_CONNECTIONS"
POOL_DEFAULT = 200
GONE = {"SandboxNotRunningException", "SandboxNotFoundException", "SandboxUnreachableException"}


def open_sdk(connections: int) -> ModuleType:
    """Return the package `e2b`, able to hold `connections` requests at once.

    Raises SandboxUnavailable: not installed, no key, or imported before with a smaller pool.
    """
    if not os.environ.get("E2B_API_KEY"):
        raise SandboxUnavailable(
            "sandbox.kind=e2b: E2B_API_KEY is not set; export it (keys are read from the "
            "environment only, never from a config)"
        )
    allowed = int(os.environ.get(POOL, POOL_DEFAULT))
    if allowed < connections:
        if "e2b" in sys.modules:
            raise SandboxUnavailable(
                f"sandbox.kind=e2b: {connections} requests at once are needed and the SDK was "
                f"imported with a pool of {allowed}: set {POOL}={connections} before"
            )
        os.environ[POOL] = str(connections)
    try:
        return importlib.import_module("e2b")
    except ImportError as error:
        raise SandboxUnavailable(
            f"sandbox.kind=e2b: {error}; install the SDK: `pip install 'agentrl-slurm[e2b]'`"
        ) from error


def is_slow(error: Exception) -> bool:
    """Whether a command, or the wait for it, ran out of time, and no more than that.

    "The sandbox is gone" is a TimeoutException there too. By the classes' names, as the oldest SDK
    that is borne lacks some of them.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return "TimeoutException" in names and not names & GONE


def is_refused_for_now(error: Exception) -> bool:
    """Whether the service asks to come back later (429, or it is busy)."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"RateLimitException", "ServiceBusyException"})


def is_unanswered(error: Exception) -> bool:
    """Whether the connection ended before an answer: what was asked may have been done."""
    return "TransportError" in {kind.__name__ for kind in type(error).__mro__}
