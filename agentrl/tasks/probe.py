"""Runs drafts of `repair` tasks in one process: picks the tests and records what each of them does.

`python -m agentrl.tasks.probe` reads a list of Draft a line, writes one of Proved or null.
One process for thousands of drafts: a process each would cost 30 ms and more instead of 2.
"""

from __future__ import annotations

import contextlib
import io
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import msgspec

LIMIT_S = 0.02
"""CPU time for all calls of one version, many times the usual: a bug can loop for ever."""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A module with and without its bug, and calls that may become tests."""

    gold: str
    bug: str
    rivals: list[str]
    """The module after each wrong edit of the bug: good tests tell them from the gold."""
    calls: list[str]
    module: str
    """Name of the module, without `.py`."""
    tests: int


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """What running the tests showed."""

    test_source: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    first_failure: str
    """As in `assert f(2) == 3 # got 4`."""


class Calls(NamedTuple):
    """Calls compiled as one list of functions: a compilation each would take most of the time."""

    code: CodeType
    size: int


class CallTimeout(BaseException):
    """Not an Exception, so that the code under test does not catch it."""


def prove(draft: Draft) -> Proved | None:
    """Choose the tests and run them on gold and bug; None when the bug changes no test."""
    thunks = ", ".join(f"lambda: {call}" for call in draft.calls)
    calls = Calls(compile(f"[{thunks}]", "<calls>", "eval"), len(draft.calls))
    gold = _outcomes(draft.gold, calls)
    bug = _outcomes(draft.bug, calls)
    usable = [i for i, outcome in enumerate(gold) if not outcome.startswith("!")]
    failing = [i for i in usable if gold[i] != bug[i]]
    if not failing:
        return None
    rivals = [_outcomes(rival, calls) for rival in draft.rivals]
    chosen = _choose(usable, failing, gold, [bug, *rivals], draft.tests)
    test_source = _write_tests(draft, chosen, gold)
    passes_gold = run_tests(draft.module, draft.gold, test_source)
    passes_bug = run_tests(draft.module, draft.bug, test_source)
    file = f"test_{draft.module}.py"
    fail_to_pass = [f"{file}::{name}" for name, ok in passes_bug.items() if not ok]
    if not all(passes_gold.values()) or not fail_to_pass:
        return None
    first = next(i for i in chosen if gold[i] != bug[i])
    got = bug[first].removeprefix("!")
    return Proved(
        test_source=test_source,
        fail_to_pass=fail_to_pass,
        pass_to_pass=[f"{file}::{name}" for name, ok in passes_bug.items() if ok],
        first_failure=f"assert {draft.calls[first]} == {gold[first]} # got {got}",
    )


def run_tests(module: str, source: str, test_source: str) -> dict[str, bool]:
    """Run every `test_*` function of `test_source` against `source`; name → passed."""
    tests: dict[str, Any] = {}
    imported = ModuleType(module)
    exec(compile(source, f"{module}.py", "exec"), imported.__dict__)  # our own functions
    sys.modules[module] = imported
    try:
        exec(compile(test_source, f"test_{module}.py", "exec"), tests)  # our own tests
    finally:
        del sys.modules[module]
    return {name: _passes(test) for name, test in tests.items() if name.startswith("test_")}


def _passes(test: Any) -> bool:
    try:
        with _bounded():
            test()
    except (Exception, CallTimeout):
        return False
    return True


def _outcomes(source: str, calls: Calls) -> list[str]:
    """Return the repr of each call's value, or `!` and the name of what it raised."""
    scope: dict[str, Any] = {}
    found: list[str] = []
    try:
        with _bounded():
            exec(compile(source, "<module>", "exec"), scope)  # our own functions
            for thunk in eval(calls.code, scope):
                found.append(_outcome(thunk))
    except CallTimeout:
        found += ["!CallTimeout"] * (calls.size - len(found))
    return found


def _outcome(thunk: Callable[[], object]) -> str:
    try:
        return repr(thunk())
    except Exception as error:
        return f"!{type(error).__name__}"


def _choose(
    usable: list[int], failing: list[int], gold: list[str], wrong: list[list[str]], count: int
) -> list[int]:
    """Take one failing call, then whichever tells most of the still undetected wrong versions."""
    chosen = [failing[0]]
    alive = [outcomes for outcomes in wrong if outcomes[failing[0]] == gold[failing[0]]]
    while len(chosen) < min(count, len(usable)):
        left = [i for i in usable if i not in chosen]
        best = max(left, key=lambda i: sum(outcomes[i] != gold[i] for outcomes in alive))
        chosen.append(best)
        alive = [outcomes for outcomes in alive if outcomes[best] == gold[best]]
    passing = [i for i in usable if i not in failing]
    if passing and not set(chosen) & set(passing):
        chosen[-1] = passing[0]  # PASS_TO_PASS should not be empty
    return sorted(chosen)


def _write_tests(draft: Draft, chosen: list[int], gold: list[str]) -> str:
    names = dict.fromkeys(draft.calls[i].split("(")[0] for i in chosen)
    parts = [f"from {draft.module} import {', '.join(names)}\n"]
    for number, i in enumerate(chosen):
        parts.append(f"\n\ndef test_{number}():\n    assert {draft.calls[i]} == {gold[i]}\n")
    return "".join(parts)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    signal.setitimer(
        signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S
    )  # again and again: one may be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise CallTimeout


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # a loop may append without end
    signal.signal(signal.SIGVTALRM, _on_alarm)
    decoder = msgspec.json.Decoder(list[Draft])
    encoder = msgspec.json.Encoder()
    answers = sys.stdout.buffer
    sys.stdout = io.StringIO()  # what tested code prints is not an answer
    for line in sys.stdin.buffer:
        answers.write(encoder.encode([prove(draft) for draft in decoder.decode(line)]) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
