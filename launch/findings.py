"""What a check found, for people as a table and for programs as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from launch.command import say
from slurm.exit_record import DONE, FAILED

State = Literal["ok", "warn", "fail", "skip"]
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    state: State
    found: str
    advice: str = ""
    """What to do, where something is to be done."""


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, state="ok", found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, state="warn", found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, state="fail", found=found, advice=advice)


def skip(name: str, why: str) -> Finding:
    return Finding(name=name, state="skip", found=why)


def looked(name: str, look: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what `look` finds; what it raises is a failure of `name`, in its own words."""
    try:
        found = look()
        yield from [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # a check of a broken machine may raise anything
        text = str(error).strip().splitlines() or [""]
        yield fail(name, f"{type(error).__name__}: {text[0]}", "see the words on the left")


def show(findings: Iterable[Finding], *, as_json: bool, **facts: object) -> int:
    """Print findings as they come; return 1 if one failed. facts: go into the JSON only."""
    seen: list[Finding] = []
    for item in findings:
        seen.append(item)
        if not as_json:
            say(line_of(item))
    bad = [item for item in seen if item.state == "fail"]
    if as_json:
        say(json.dumps({**facts, "ok": not bad, "findings": list(map(asdict, seen))}, indent=1))
    else:
        warned = sum(item.state == "warn" for item in seen)
        say(f"{len(seen)} looked at, {len(bad)} failed, {warned} to be aware of")
    return FAILED if bad else DONE


def line_of(item: Finding) -> str:
    advice = f"\n{'':>28}{item.advice}" if item.advice else ""
    return f"{MARKS[item.state]}  {item.name:<20}  {item.found}{advice}"
