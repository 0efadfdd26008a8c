"""The repository tests itself: configs, documentation, import arrows, and what is not used."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path

import pytest

from agentrl import config, errors
from launch.cli import COMMANDS

ROOT = Path(__file__).parent.parent
FOLDERS = ("agentrl", "slurm", "containers", "launch", "analysis", "benchmarks", "configs")
MAY_IMPORT = {
    "agentrl": (),
    "slurm": ("agentrl.errors", "agentrl.events", "agentrl.handoff.publish"),
    "containers": ("agentrl.errors",),
    "launch": ("agentrl", "slurm", "containers", "analysis"),
    "analysis": (
        "agentrl.errors",
        "agentrl.events",
        "agentrl.config",
        "agentrl.estimators",
        "agentrl.handoff.publish",
    ),
}
"""folder → what it may import beside itself, by module (a package stands for all in it)."""
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Yield each module that `path` imports; `from a import b` gives a.b if that is a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)}:{node.lineno}: relative import; write it whole"
            base = node.module or ""
            for alias in node.names:
                inner = ROOT / base.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{base}.{alias.name}" if is_module else base


def is_under(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


# Configs


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_run_config_is_valid(path: Path) -> None:
    assert config.load(path).name


def test_every_config_key_has_its_doc_line() -> None:
    missing = []
    for node in tree(ROOT / "agentrl" / "config.py").body:
        if not isinstance(node, ast.ClassDef) or not is_dataclass(getattr(config, node.name)):
            continue
        for item, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(item, ast.AnnAssign) or "field(" in ast.unparse(item):
                continue
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not is_doc:
                missing.append(f"{node.name}.{ast.unparse(item.target)}")
    assert missing == []


# Imports


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_the_way_that_the_design_allows(folder: str) -> None:
    bad = [
        f"{name_of(path)} imports {module}"
        for path in modules(folder)
        for module in imports(path)
        if module.partition(".")[0] in FOLDERS
        and module.partition(".")[0] != folder
        and not any(is_under(module, allowed) for allowed in MAY_IMPORT[folder])
    ]
    assert bad == []


def test_importing_analysis_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, analysis; print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


# What is not used


BANNED_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "sqlite3", "fcntl", "lmdb")
BANNED_CALLS = (
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "fcntl.flock",
    "os.system",
)


@pytest.mark.parametrize("folder", ["agentrl", "slurm", "launch", "analysis"])
def test_nothing_loads_code_from_files_or_locks_them(folder: str) -> None:
    bad = []
    for path in modules(folder):
        used = set(imports(path)) & set(BANNED_MODULES)
        bad += [f"{name_of(path)} imports {module}" for module in sorted(used)]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and (found := _banned(node)):
                bad.append(f"{name_of(path)}:{node.lineno} {found}")
    assert bad == []


def _banned(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    if name in BANNED_CALLS:
        return f"calls {name}"
    for keyword in call.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg == "shell" and is_true:
            return f"calls {name} with shell=True"
    return ""


# Size


Function = ast.FunctionDef | ast.AsyncFunctionDef


def own_lines(function: Function) -> int:
    """Return a function's length; what is defined inside it is measured by itself."""
    inner = [node for node in ast.iter_child_nodes(function) if isinstance(node, Function)]
    inner += [node for node in ast.iter_child_nodes(function) if isinstance(node, ast.ClassDef)]
    return _length(function) - sum(map(_length, inner))


def _length(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_a_screen_and_a_bit() -> None:
    bad = [
        f"{name_of(path)}:{node.lineno} {node.name}: {length} lines"
        for path in modules(*FOLDERS, "tests")
        for node in ast.walk(tree(path))
        if isinstance(node, Function) and (length := own_lines(node)) > LONGEST_FUNCTION
    ]
    assert bad == []


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))  # pytest takes them for modules of one name


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in modules(*FOLDERS)}
    assert {name: count for name, count in lengths.items() if count > LONGEST_FILE} == {}


# Errors


ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AgentRLError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[errors.AgentRLError]) -> None:
    error = kind("nodes=0 in job 'x': must be 1 or more")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (type(again), str(again), again.args) == (kind, str(error), error.args)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_means(kind: type[errors.AgentRLError]) -> None:
    assert kind.__doc__


# README, docs and commands


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of `page`."""
    heads = re.findall(r"^#+ +(.+?)\s*$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_resolve(page: Path) -> None:
    bad = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        is_known = not anchor or target.suffix != ".md" or anchor in anchors(target)
        if not target.exists() or not is_known:
            bad.append(link)
    assert bad == []


def commands_of_readme() -> list[list[str]]:
    block = re.search(r"^```[a-z]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert block, "README.md has no code block with the commands to begin with"
    lines = [line.removeprefix("$ ") for line in block[1].splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def test_the_first_commands_of_the_readme_exist() -> None:
    for words in commands_of_readme():
        if words[0] == "make":
            assert set(words[1:]) <= make_targets(), f"{words}: no such target in the Makefile"
        elif words[0].endswith("agentrl"):
            assert words[1] in COMMANDS, f"{words}: agentrl has no such command"
        else:
            assert words[0] in ("git", "cd"), f"{words}: neither make, agentrl, git nor cd"


@pytest.mark.slow
def test_every_command_answers_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"launch.{command}").main(["--help"])
        assert ended.value.code == 0, command
        assert f"usage: agentrl {command}" in capsys.readouterr().out
