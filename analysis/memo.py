"""Results of a run that several figures need, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from analysis.run_files import Run

Result = TypeVar("Result")


def remembered(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
    """Decorate a function of a run so that it is computed once for each run's events."""

    @wraps(function)
    def once(run: Run) -> Result:
        memo, key = run.store.memo, (function.__module__, function.__qualname__)
        if key not in memo:
            memo[key] = function(run)
        return cast(Result, memo[key])

    return once
