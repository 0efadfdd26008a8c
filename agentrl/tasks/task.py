"""One task: an issue, a repository state, and the tests that decide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import TaskError
from agentrl.tasks.frameworks import PARSERS

_PLAIN = re.compile(r"(?!\.)[\w.+@=,: -]+")
Edit = tuple[int, str, str]
"""Line of the file, sed pattern, new text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifier:
    """Harbor's way to decide: a folder with `test.sh`, which writes a reward."""

    folder: str
    """On this host."""
    timeout_s: float
    env: Mapping[str, str]
    workdir: str
    """What the task calls the repository's root, as /app; here it is the testbed."""
    is_fresh: bool = True
    """Judges the changes of the repository in a fresh sandbox, not the agent's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """An issue with its repository, its tests and its fix, whatever form it was read from."""

    instance_id: str
    repo: str
    problem_statement: str
    patch: str
    """The bug, as a patch whose reverse is the fix; empty where `gold` is given instead."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image_name: str
    """What the sandbox starts from: for `repair` a folder below the tasks' folder."""
    base_commit: str = ""
    """What of its git repository the image is made from; empty: HEAD."""
    gold: str = ""
    """The fix as a patch; `solution` has it where it is a program."""
    test_command: str = "python check.py"
    """Runs the tests from the repository's root."""
    framework: str = ""
    """Whose results those are, one of tasks.frameworks; empty: `ID PASSED` lines are."""
    test_files: tuple[str, ...] = ()
    """Paths, relative to the root, that are restored before grading."""
    test_patch: str = ""
    """Applied to those before grading; the agent never has it."""
    hidden_files: Mapping[str, bytes] = field(default_factory=dict)
    """Path → content of tests that are put in place for grading only."""
    solution: str = ""
    """Folder, on this host, of a program `solve.sh` that is the fix (Harbor)."""
    verifier: Verifier | None = None
    """The folder of tests that decides by a reward it writes (Harbor); then no test has a name."""
    network: str = ""
    """What the task asks for, in its own word. A sandbox has no network all the same."""
    difficulty: str = ""
    cluster: str = ""
    """Tasks of one cluster share a (function, site, replacement): the unit of the bootstrap."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text of the buggy repository, where the image is made from the row."""
    fix: Edit | None = None
    """The right edit, where one line is all: what the scripted expert knows."""
    rivals: tuple[Edit, ...] = ()
    """Wrong edits of the same family, for the expert's failing tries."""

    def __post_init__(self) -> None:
        if not _PLAIN.fullmatch(self.instance_id):  # it names folders on this host
            raise TaskError(
                f"task {self.instance_id!r}: its id must be letters, digits and ._+@=,: - only, "
                "with no dot first: rename it"
            )
        if self.framework not in PARSERS:
            raise TaskError(
                f"task {self.instance_id}: framework={self.framework!r}: must be one of "
                f"{', '.join(filter(None, PARSERS))}, or empty for `ID PASSED` lines"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the tests said of a repository state."""

    resolved: bool
    """Every test of FAIL_TO_PASS and PASS_TO_PASS passed; a missing test counts as failed."""
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    log: str
