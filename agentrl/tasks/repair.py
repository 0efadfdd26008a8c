"""The seeded generator of `repair` tasks: a small repository, its tests, and one planted bug."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from agentrl.tasks.check import CHECK
from agentrl.tasks.library import CONSTANTS, Template, all_names, library, new_names
from agentrl.tasks.mutate import PATTERNS, Edit, edits, is_addressable
from agentrl.tasks.probe import Draft, Proved

MODULE = "f"
CALLS = 20
TESTS = 5
WORDS = ("ba", "mi", "pane", "fodu", "lamo", "nabe", "mikoda", "gabana", "dogafi", "nopamala")

Triple = tuple[str, int, str]
"""(function, site, replacement): which bug it is, apart from names and numbers."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it is stored: SWE-smith's columns, and what the repository is rebuilt from."""

    instance_id: str
    repo: str
    patch: str
    """The bug, as a diff that `git apply` takes; its reverse is the gold fix."""
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    image_name: str
    problem_statement: str
    files: dict[str, str] = {}
    """Path → text of the buggy repository."""
    test_command: str = "python check.py"
    test_files: list[str] = []
    function: str = ""
    site: int = 0
    replacement: str = ""
    kind: str = ""
    names: list[str] = []
    constants: list[int] = []
    fix: tuple[int, str, str] | None = None
    """The one right edit: line of the file, sed pattern, new text."""
    rivals: list[tuple[int, str, str]] = []
    """Wrong edits of the same family, at the same function."""

    @property
    def triple(self) -> Triple:
        return self.function, self.site, self.replacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One bug to be made: where, and from which stock of names and numbers."""

    triple: Triple
    names: tuple[str, ...]
    is_reserved: bool
    """Whether to take the constants that are kept from training, or the others."""
    functions: int
    """Functions in the module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A drafted instance, before its tests have run."""

    wanted: Wanted
    draft: Draft
    names: list[str]
    constants: list[int]
    edit: Edit
    first_line: int
    """Line of the file before the function with the bug."""
    buggy_function: str
    fix: tuple[int, str, str]
    rivals: list[tuple[int, str, str]]


def all_triples() -> list[tuple[Triple, str]]:
    """Return every bug that the library allows, with its kind, in a fixed order.

    A constant drawn at random is never the bug: nothing in the code tells what it should be.
    """
    found = []
    for name, template in library().items():
        names = dict(zip(template.names, all_names(), strict=False))
        source = template.render(names, {key: 990 + i for i, key in enumerate(template.constants)})
        found += [
            ((name, edit.site, edit.replacement), edit.kind)
            for edit in edits(source)
            if is_addressable(edit, source) and not edit.old.startswith("99")
        ]
    return found


def is_reserved(function: str, constants: Iterable[int]) -> bool:
    """Whether these constants of this function are kept from training (one in five)."""
    return random.Random(f"{function} {list(constants)}").random() < 0.2


def plan(wanted: Wanted, rng: random.Random) -> Plan | None:
    """Draw names, constants and calls; None when no `sed` command names the repair alone."""
    template = library()[wanted.triple[0]]
    others = [name for name in library() if name != template.name]
    members = [template, *(library()[name] for name in rng.sample(others, wanted.functions - 1))]
    rng.shuffle(members)
    stock = new_names(rng, sum(len(member.names) for member in members), wanted.names)
    sources: list[str] = []
    calls: list[list[str]] = []
    first_line = 0
    for member in members:
        names = dict(zip(member.names, (stock.pop() for _ in member.names), strict=True))
        constants = _constants(member, wanted.is_reserved, rng)
        if member is template:
            first_line = sum(source.count("\n") + 2 for source in sources)
            target = len(sources), names, constants
        sources.append(member.render(names, constants))
        calls.append(_calls(member, names[member.name], list(constants.values()), rng))
    where, names, constants = target
    edit = _find(sources[where], wanted.triple)
    if edit is None:
        return None
    buggy = edit.apply(sources[where])
    fix = edit.reverse()
    if not is_addressable(fix, buggy):
        return None
    rivals = [
        other
        for other in edits(buggy)
        if is_addressable(other, buggy)
        and (other.line, other.kind, other.new) != (fix.line, fix.kind, fix.new)
    ]
    own = calls.pop(where)
    return Plan(
        wanted=wanted,
        draft=Draft(
            gold=_join(sources, where, sources[where]),
            bug=_join(sources, where, buggy),
            rivals=[_join(sources, where, rival.apply(buggy)) for rival in rivals],
            calls=own + [call for some in calls for call in some[:4]],
            module=MODULE,
            tests=TESTS,
        ),
        names=list(names.values()),
        constants=list(constants.values()),
        edit=edit,
        first_line=first_line,
        buggy_function=buggy,
        fix=_command(fix, first_line),
        rivals=[_command(rival, first_line) for rival in rivals],
    )


def finish(plan: Plan, proved: Proved, instance_id: str) -> Row:
    """Turn a plan whose tests have run into a stored row."""
    function, site, replacement = plan.wanted.triple
    test_file = f"test_{MODULE}.py"
    return Row(
        instance_id=instance_id,
        repo=f"repair/{library()[function].module}",
        patch=_diff(plan.draft.gold, plan.draft.bug),
        FAIL_TO_PASS=proved.fail_to_pass,
        PASS_TO_PASS=proved.pass_to_pass,
        image_name=f"images/{instance_id}",
        problem_statement=f"{_number(plan)}{proved.first_failure}",
        files={
            f"{MODULE}.py": plan.draft.bug,
            test_file: proved.test_source,
            "check.py": CHECK,
        },
        test_files=[test_file, "check.py"],
        function=function,
        site=site,
        replacement=replacement,
        kind=plan.edit.kind,
        names=plan.names,
        constants=plan.constants,
        fix=plan.fix,
        rivals=plan.rivals,
    )


def _constants(template: Template, reserved: bool, rng: random.Random) -> dict[str, int]:
    while True:
        drawn = {key: rng.randint(*CONSTANTS) for key in template.constants}
        values = list(drawn.values())
        if not values or is_reserved(template.name, values) == reserved:
            return drawn


def _find(source: str, triple: Triple) -> Edit | None:
    """Return the bug's edit; None where these constants do not allow it (3 - 2, say)."""
    return next((e for e in edits(source) if (e.site, e.replacement) == triple[1:]), None)


def _command(edit: Edit, first_line: int) -> tuple[int, str, str]:
    return edit.line + first_line, PATTERNS[edit.kind], edit.new


def _join(sources: list[str], where: int, source: str) -> str:
    return "\n\n".join([*sources[:where], source, *sources[where + 1 :]])


def _number(plan: Plan) -> str:
    lines = plan.buggy_function.splitlines()
    return "".join(f"{i} {line}\n" for i, line in enumerate(lines, plan.first_line + 1))


def _diff(gold: str, bug: str) -> str:
    path = f"{MODULE}.py"
    lines = difflib.unified_diff(
        gold.splitlines(keepends=True), bug.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(lines)


def _calls(template: Template, name: str, constants: list[int], rng: random.Random) -> list[str]:
    """Return different calls; numbers are often at, or beside, the function's own constants."""
    drawn = (
        f"{name}({', '.join(_argument(kind, constants, rng) for kind in template.kinds)})"
        for _ in range(2 * CALLS)
    )
    return list(dict.fromkeys(drawn))[:CALLS]


def _argument(kind: str, constants: list[int], rng: random.Random) -> str:
    return str(_draw(kind, constants, rng)).replace("'", '"')


def _draw(kind: str, constants: list[int], rng: random.Random) -> object:
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "few":
        return rng.randint(1, 9)
    if kind == "word":
        return rng.choice(WORDS)
    if kind == "words":
        return [rng.choice(WORDS) for _ in range(rng.randint(2, 4))]
    if kind == "ints":
        return [_draw("int", constants, rng) for _ in range(rng.randint(2, 5))]
    if constants and rng.random() < 0.6:
        return max(0, rng.choice(constants) + rng.randint(-1, 1))
    return rng.randint(0, 45)


def numbered(rows: Iterable[Row], split: str) -> Iterator[Row]:
    """Yield `rows` with ids that name the split and the position."""
    for i, row in enumerate(rows):
        name = f"repair__{split}-{i:05d}"
        yield msgspec.structs.replace(row, instance_id=name, image_name=f"images/{name}")
