"""Six tiny repositories with history, tests and gold patches, in every form that tasks come in."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _pytest
import pluggy
import pytest

from agentrl.config import RunConfig, SandboxConfig, TasksConfig
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.grade import grade
from agentrl.tasks.load import image_folder, load_split
from agentrl.tasks.task import Task, Verdict

Act = Callable[[Sandbox], Awaitable[Any]]
SETUP = "export PYTHONPATH=.deps"
"""Sandboxes have no pytest of their own: each image has one in .deps, unknown to its git."""
FORMS = ("swesmith", "swebench", "r2egym", "harbor")


@dataclass(frozen=True)
class Project:
    """A repository whose `bad` was mended to `good`, and the tests before and after that."""

    name: str
    good: str
    bad: str
    kept: str
    """Body of a test that passes with either."""
    added: str
    """Body of the test that came with the fix."""
    difficulty: str = "easy"

    @property
    def path(self) -> str:
        return f"{self.name}/core.py"

    @property
    def old_tests(self) -> str:
        return f"from {self.name}.core import f\n\n\ndef test_kept():\n    {self.kept}\n"

    @property
    def new_tests(self) -> str:
        return f"{self.old_tests}\n\ndef test_added():\n    {self.added}\n"


def _f(body: str) -> str:
    return f'"""A module."""\n\n\ndef f(x):\n    {body}\n'


def _project(name: str, good: str, bad: str, asserts: str, *, difficulty: str = "easy") -> Project:
    kept, _, added = asserts.partition("; ")
    return Project(
        name=name, good=_f(good), bad=_f(bad), kept=kept, added=added, difficulty=difficulty
    )


PROJECTS = (
    _project("adder", "return x + 1", "return x - 1", "assert f; assert f(1) == 2"),
    _project("lower", "return x.lower()", "return x", "assert f('a') == 'a'; assert f('A') == 'a'"),
    _project("middle", "return sorted(x)[1]", "return x[1]", "assert f; assert f([3, 1, 2]) == 2"),
    _project("unique", "return [*{*x}]", "return [*x]", "assert f([1]); assert f([1, 1]) == [1]"),
    _project(
        "digits",
        "return sum(map(int, str(abs(x))))",
        "return sum(map(int, str(x)))",
        "assert f(12) == 3; assert f(-12) == 3",
        difficulty="hard",
    ),
    _project(
        "clamp",
        "return min(max(x, 0), 9)",
        "return max(x, 0)",
        "assert f(-1) == 0; assert f(10) == 9",
        difficulty="hard",
    ),
)


def git(folder: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "a", f"GIT_{who}_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def write_project(project: Project, folder: Path) -> tuple[str, str]:
    """Make the repository, three commits deep; return the commits before and with the fix."""
    (folder / project.name).mkdir(parents=True)
    (folder / "tests").mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / project.name / "__init__.py").write_text("")
    _commit(folder, "first")
    (folder / project.path).write_text(project.bad)
    (folder / f"tests/test_{project.name}.py").write_text(project.old_tests)
    before = _commit(folder, "a bug")
    (folder / project.path).write_text(project.good)
    (folder / f"tests/test_{project.name}.py").write_text(project.new_tests)
    return before, _commit(folder, "the fix")


def _commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def write_form(form: str, folder: Path, projects: tuple[Project, ...] = PROJECTS) -> None:
    """Write the `train` split of `projects` in one form, with the clones that its images need."""
    rows = []
    for project in projects:
        clone = folder / "repositories" / f"lab__{project.name}"
        before, after = write_project(project, clone)
        if form == "harbor":
            write_harbor(project, folder / "train" / project.name)
            continue
        rows.append(ROWS[form](project, clone, before, after))
    if rows:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def swesmith_row(project: Project, clone: Path, before: str, after: str) -> dict[str, object]:
    file = f"tests/test_{project.name}.py"
    return {
        "instance_id": f"lab__{project.name}.bug",
        "repo": f"lab/{project.name}",
        "patch": git(clone, "diff", after, before, "--", project.path),
        "FAIL_TO_PASS": [f"{file}::test_added"],
        "PASS_TO_PASS": [f"{file}::test_kept"],
        "image_name": f"swebench/swesmith.x86_64.lab_1776_{project.name}",
        "problem_statement": f"{project.name} is wrong",
    }


def swebench_row(project: Project, clone: Path, before: str, after: str) -> dict[str, object]:
    file = f"tests/test_{project.name}.py"
    return {
        "instance_id": f"lab__{project.name}-1",
        "repo": f"lab/{project.name}",
        "base_commit": before,
        "patch": git(clone, "diff", before, after, "--", project.path),
        "test_patch": git(clone, "diff", before, after, "--", "tests"),
        "FAIL_TO_PASS": json.dumps([f"{file}::test_added"]),
        "PASS_TO_PASS": json.dumps([f"{file}::test_kept"]),
        "problem_statement": f"{project.name} is wrong",
        "hints_text": "",
        "created_at": "2024-01-01",
        "version": "1.0",
        "environment_setup_commit": before,
        "difficulty": project.difficulty,
    }


def r2egym_row(project: Project, clone: Path, before: str, after: str) -> dict[str, object]:
    del clone
    change = {
        "header": {"file": {"path": project.path}},
        "old_file_content": project.bad,
        "new_file_content": project.good,
    }
    ran = "PASSED r2e_tests/test_1.py::test_kept\nFAILED r2e_tests/test_1.py::test_added - no\n"
    return {
        "repo_name": f"lab__{project.name}",
        "docker_image": f"namanjain12/{project.name}_final:{after}",
        "commit_hash": after,
        "parsed_commit_content": json.dumps({"old_commit_hash": before, "file_diffs": [change]}),
        "execution_result_content": json.dumps(
            {
                "test_file_names": ["test_1.py"],
                "test_file_codes": [project.new_tests],
                "old_commit_res_stdout": ran,
            }
        ),
        "problem_statement": f"[ISSUE]\n{project.name} is wrong\n[/ISSUE]",
        "expected_output_json": json.dumps({"test_kept": "PASSED", "test_added": "PASSED"}),
    }


ROWS = {"swesmith": swesmith_row, "swebench": swebench_row, "r2egym": r2egym_row}
TEST_SH = """\
#!/bin/bash
cd /app
if python -m pytest -q -p no:cacheprovider /tests/test_state.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
TASK_TOML = """\
schema_version = "1.4"
[task]
name = "lab/{name}"
[metadata]
difficulty = "{difficulty}"
[verifier]
timeout_sec = 60.0
env = {{ PYTHONPATH = ".deps:." }}
[environment]
network_mode = "no-network"
cpus = 1
"""


def write_harbor(project: Project, folder: Path) -> None:
    texts = {
        "task.toml": TASK_TOML.format(name=project.name, difficulty=project.difficulty),
        "instruction.md": f"In /app, {project.name} is wrong.\n",
        "environment/Dockerfile": "FROM python:3.11\nWORKDIR /app\nCOPY src/ /app/\nRUN true\n",
        f"environment/src/{project.path}": project.bad,
        f"environment/src/{project.name}/__init__.py": "",
        "tests/test.sh": TEST_SH,
        "tests/test_state.py": project.new_tests,
        "solution/core.py": project.good,
        "solution/solve.sh": f"cp /solution/core.py /app/{project.path}\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def make_deps(folder: Path) -> Path:
    """Copy this pytest, compiled for the Python in sandboxes; what only colours is a stand-in."""
    packages = [Path(module.__file__ or "").parent for module in (_pytest, pytest, pluggy)]
    site = packages[0].parent
    about = (path for name in ("pytest", "pluggy") for path in site.glob(f"{name}-*.dist-info"))
    for source in (*packages, site / "iniconfig", site / "packaging", *about):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=ignored)
    shutil.copy(site / "py.py", folder)
    parts = ("formatters", "formatters/terminal", "lexer", "lexers", "lexers/diff", "lexers/python")
    for name in ("", *parts, "util"):
        path = folder / "pygments" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(
            "TerminalFormatter = Lexer = DiffLexer = PythonLexer = highlight = object\n"
        )
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    flags = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(folder)]
    subprocess.run([python, *flags], check=True)
    return folder


def add_deps(deps: Path, image: Path) -> Path:
    """Lend an image its pytest."""
    target = image / "testbed/.deps"
    if not target.exists():
        shutil.copytree(deps, target, copy_function=os.link)
        (image / "testbed/.git/info").mkdir(exist_ok=True)
        with (image / "testbed/.git/info/exclude").open("a") as file:
            file.write(".deps/\n")
    return image


class Forms:
    """Makes splits and grades what is done to their tasks in real sandboxes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._deps: Path | None = None

    @property
    def deps(self) -> Path:
        self._deps = self._deps or make_deps(self.folder / "deps")
        return self._deps

    def config(self, form: str, *projects: Project, **keys: Any) -> TasksConfig:
        """Return the config of a split of `projects`, by default all six, made once."""
        chosen = projects or PROJECTS
        folder = self.folder / "-".join([form, *(project.name for project in projects)])
        if not folder.exists():
            write_form(form, folder, chosen)
        return TasksConfig(
            source=form, folder=str(folder), test_setup=SETUP, grade_timeout_s=60, **keys
        )

    def run_config(self, form: str, *projects: Project) -> RunConfig:
        """Return a run's config over such a split, its images made."""
        config = RunConfig(tasks=self.config(form, *projects))
        for task in load_split(config.tasks, "train"):
            self.image(config.tasks, task)
        config.rollout.concurrency = 4
        return config

    def image(self, config: TasksConfig, task: Task) -> Path:
        return add_deps(self.deps, image_folder(config, task))

    def graded(
        self, task: Task, image: Path, act: Act | str = "true", *, timeout_s: float = 60.0
    ) -> Verdict:
        """Return the verdict on what a command, or a coroutine, leaves in a sandbox."""

        async def body(provider: SandboxProvider) -> Verdict:
            sandbox = await provider.start(image, owner="test")
            if isinstance(act, str):
                await sandbox.exec(act, timeout_s=60)
            else:
                await act(sandbox)
            return await grade(task, sandbox, image=image, timeout_s=timeout_s)

        return self.with_provider(body)

    def with_provider(self, body: Callable[[SandboxProvider], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            leases = self.folder / "leases"
            provider = open_provider(SandboxConfig(), run="test", leases=leases, concurrency=2)
            try:
                return await body(provider)
            finally:
                await provider.close()

        return asyncio.run(main())
