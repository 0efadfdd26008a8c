"""Callables by reference: `module:name` and JSON arguments, so that nothing is ever unpickled.

What a role runs is looked up by import on the other side. Lambdas, closures, bound methods and
arguments that JSON cannot carry are refused with the way out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import LaunchError


class Reference(msgspec.Struct, kw_only=True, frozen=True):
    """A function that another process can import, and its arguments."""

    function: str
    """`package.module:name`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def resolve(self, **extra: Any) -> Callable[[], Any]:
        """Import the function and bind its arguments; `extra` where it has such a parameter."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        wanted = inspect.signature(function).parameters
        bound = set(inspect.signature(function).bind_partial(*self.args, **self.kwargs).arguments)
        kwargs = self.kwargs | {k: v for k, v in extra.items() if k in wanted and k not in bound}
        return functools.partial(function, *self.args, **kwargs)


def refer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Reference:
    """Return the reference of `function`, unwrapping functools.partial. Raises LaunchError."""
    if isinstance(function, functools.partial):
        return refer(function.func, *function.args, *args, **(function.keywords | kwargs))
    return Reference(
        function=_name_of(function),
        args=[_plain(value, function) for value in args],
        kwargs={name: _plain(value, function) for name, value in kwargs.items()},
    )


def _name_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if not module or not inspect.isfunction(function) or "." in name or "<" in name:
        raise LaunchError(
            f"role function {name or function!r}: not importable by name; give a function of a "
            "module's top level, or functools.partial of one with plain arguments (no lambda, "
            "closure, method or class)"
        )
    if module == "__main__":
        raise LaunchError(
            f"role function {name!r} is defined in the script that is running (__main__), which "
            "another process cannot import; move it into a module"
        )
    return f"{module}:{name}"


def _plain(value: Any, function: Callable[..., Any]) -> Any:
    if isinstance(value, Path):
        value = os.fspath(value)
    try:
        same = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        same, reason = None, f": {error}"
    else:
        reason = f": it would arrive as {same!r}"
    if same != value:
        raise LaunchError(
            f"argument {value!r} of role function {function.__qualname__!r} is not plain JSON"
            f"{reason}; pass strings, numbers, lists and dicts, and the path of anything larger"
        )
    return value
