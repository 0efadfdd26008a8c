"""One task: an issue, a repository state, and the tests that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Edit = tuple[int, str, str]
"""Line of the file, sed pattern, new text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A row of SWE-smith's schema, where `patch` is the bug and its reverse the gold fix."""

    instance_id: str
    repo: str
    problem_statement: str
    patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image_name: str
    """What the sandbox starts from: for `repair` a folder below the tasks' folder."""
    test_command: str = "python check.py"
    """Runs the tests from the repository's root and prints `ID PASSED` or `ID FAILED` lines."""
    test_files: tuple[str, ...] = ()
    """Paths, relative to the root, that are restored before grading."""
    cluster: str = ""
    """Tasks of one cluster share a (function, site, replacement): the unit of the bootstrap."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text of the buggy repository, where the image is made from the row."""
    fix: Edit | None = None
    """The right edit, where one line is all: what the scripted expert knows."""
    rivals: tuple[Edit, ...] = ()
    """Wrong edits of the same family, for the expert's failing tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the tests said of a repository state."""

    resolved: bool
    """Every test of FAIL_TO_PASS and PASS_TO_PASS passed; a missing test counts as failed."""
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    log: str
