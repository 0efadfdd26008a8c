"""Whose test results a log holds, and how it says them. Pure: a log in, results by test out.

A test counts as passed on PASSED and XFAIL, as in SWE-bench; of several results the worst counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

PASSES = ("PASSED", "XFAIL")
_RANKS = ("PASSED", "XFAIL", "XPASS", "SKIPPED", "FAILED", "ERROR")
FAULTS = ("FAILED", "ERROR")
Pairs = Iterable[tuple[str, str]]

_PLAIN = re.compile(r"^(\S+::.*?|\S+) (PASSED|FAILED|ERROR)(?:\s+\[ *\d+%\])?\s*$", re.MULTILINE)
_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_SUMMARY = re.compile(rf"^({_WORDS}) (\S.*?)(?: - .*)?$")
_VERBOSE = re.compile(rf"^(\S+::.*?) ({_WORDS})\b.*$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_UNITTEST = {
    "ok": "PASSED",
    "FAIL": "FAILED",
    "ERROR": "ERROR",
    "skipped": "SKIPPED",
    "expected failure": "XFAIL",
    "unexpected success": "FAILED",
}
_UNITTEST_END = re.compile(rf"(?:^|\s)({'|'.join(_UNITTEST)})(?: ['\"].*)?\s*$", re.IGNORECASE)
_UNITTEST_NAME = re.compile(r"^(\w+) \(([\w.]+)\)$")
_SYMPY = re.compile(r"^(test_\S+) (ok|F|E|f|X|s|w)\b", re.MULTILINE)
_GO = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+)", re.MULTILINE)
_CARGO = re.compile(r"^test (.+?) \.\.\. (ok|FAILED|ignored)\b", re.MULTILINE)
_JEST = re.compile(
    r"^\s*([✓✔√✕✖×○]) (?:skipped )?(.+?)(?: \(\d+(?:\.\d+)? ?m?s\))?\s*$", re.MULTILINE
)
_TAP = re.compile(
    r"^\s*(not ok|ok) \d+ (?:- )?((?:(?! # (?:SKIP|TODO)).)+?)\s*$", re.MULTILINE | re.IGNORECASE
)
_LETTERS = {
    **dict.fromkeys(("ok", "PASS", *"✓✔√"), "PASSED"),
    **dict.fromkeys(("F", "FAIL", "FAILED", "not ok", *"✕✖×"), "FAILED"),
    **dict.fromkeys(("s", "w", "SKIP", "ignored", "○"), "SKIPPED"),
    "E": "ERROR",
    "f": "XFAIL",
    "X": "XPASS",
}


def results_of(framework: str, log: str) -> Pairs:
    """Return (test, result) for every line of `log` that says one; a test may come again."""
    return PARSERS[framework](_COLOUR.sub("", log))


def parse_log(log: str) -> dict[str, str]:
    """Read `ID PASSED|FAILED|ERROR` lines."""
    return worst(results_of("", log))


def worst(pairs: Pairs) -> dict[str, str]:
    """Return the worst result of each test."""
    found: dict[str, str] = {}
    for name, result in pairs:
        if _RANKS.index(result) >= _RANKS.index(found.get(name, "PASSED")):
            found[name] = result
    return found


def doubt(framework: str, log: str, exit_code: int) -> str:
    """Return why a log can't be believed: it claims what the runner's own end denies; else ''.

    A run whose every line passes but which ended in failure broke off, or somebody else wrote the
    lines. Passes that outnumber the runner's own count were written by somebody else.
    """
    pairs = list(results_of(framework, log))
    if framework and exit_code and not any(result in FAULTS for _, result in pairs):
        return f"the tests ended with exit code {exit_code} and no failure among their results"
    if framework == "pytest-log":
        plain = _COLOUR.sub("", log)
        passed = list(worst(_pytest_ids(plain)).values()).count("PASSED")
        claimed = re.findall(r"^=* ?.*?\b(\d+) passed\b.* in [\d.:]+", plain, re.MULTILINE)
        if passed and (not claimed or passed > int(claimed[-1])):
            return f"{passed} passes in the log; pytest itself counts {claimed[-1:] or 'none'}"
    if framework == "unittest":
        passed = list(worst(pairs).values()).count("PASSED")
        ran = re.findall(r"^Ran (\d+) tests? in ", log, re.MULTILINE)
        if passed and (not ran or passed > int(ran[-1]) * 2):  # a test may have two names
            return f"{passed} passes in the log; unittest itself counts {ran[-1:] or 'none'}"
    return ""


def names_of(node_id: str) -> tuple[str, ...]:
    """Return the names that rows have for pytest's id of a test.

    Its whole id; its first word, for SWE-bench cuts ids at a blank; the last part of a path that is
    its parameter, as SWE-bench has it for requests and pylint; and R2E-Gym's `Class.test`.
    """
    path = re.sub(r"\[(/(?!/)[^\]*]*)\]$", lambda m: f"[/{m[1].rpartition('/')[2]}]", node_id)
    inner = ".".join(node_id.split("::")[1:])
    return tuple(dict.fromkeys((node_id, node_id.split(" ")[0], path, inner)))


def _plain(log: str) -> Pairs:
    return _PLAIN.findall(log)


def _pytest(log: str) -> Iterator[tuple[str, str]]:
    return ((name, result) for node_id, result in _pytest_ids(log) for name in names_of(node_id))


def _pytest_ids(log: str) -> Iterator[tuple[str, str]]:
    for line in log.splitlines():
        if found := _SUMMARY.match(line):
            if not found[2].startswith("["):  # `SKIPPED [2] path:12: why` names no test
                yield found[2], found[1]
        elif found := _VERBOSE.match(line):
            yield found[1], found[2]


def _unittest(log: str) -> Iterator[tuple[str, str]]:
    """A test is `NAME ... RESULT`; what it prints comes between, a docstring before the dots."""
    pending: list[str] = []
    before = ""
    for line in log.splitlines():
        name, dots, rest = line.partition(" ... ")
        if dots or line.endswith(" ..."):
            pending = [name.removesuffix(" ...")]
            if _UNITTEST_NAME.match(before) and not _UNITTEST_NAME.match(pending[0]):
                pending.append(before)
        elif line.startswith(("FAIL: ", "ERROR: ")):
            yield line.partition(": ")[2], "FAILED" if line.startswith("F") else "ERROR"
        ended = _UNITTEST_END.search(rest if dots else line)
        if pending and ended and (dots or line == ended[0].strip()):
            word = ended[1] if ended[1] in _UNITTEST else ended[1].lower()
            yield from ((one, _UNITTEST.get(word, "FAILED")) for one in pending)
            pending = []
        before = line


def _pairs(pattern: re.Pattern[str], *, name: int, result: int) -> Callable[[str], Pairs]:
    def parse(log: str) -> Pairs:
        return [(found[name], _LETTERS[found[result]]) for found in pattern.finditer(log)]

    return parse


PARSERS: dict[str, Callable[[str], Pairs]] = {
    "": _plain,
    "pytest": _pytest,
    "pytest-log": _pytest,
    "r2e": _pytest,
    "unittest": _unittest,
    "sympy": _pairs(_SYMPY, name=1, result=2),
    "go": _pairs(_GO, name=2, result=1),
    "cargo": _pairs(_CARGO, name=1, result=2),
    "jest": _pairs(_JEST, name=2, result=1),
    "tap": _pairs(_TAP, name=2, result=1),
}
"""By name. `pytest` and `r2e` are believed by our plugin's report (tasks.pytest_report), and their
log only explains; the others are believed by their log."""
REPORTED = ("pytest", "r2e")
