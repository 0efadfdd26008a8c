"""Grading in real sandboxes: what earns a pass, and all that must not."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from agentrl.config import RunConfig, SandboxConfig, TasksConfig
from agentrl.errors import GradingError, TaskError
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.build import build
from agentrl.tasks.command import try_command
from agentrl.tasks.frameworks import parse_log
from agentrl.tasks.grade import grade
from agentrl.tasks.load import image_folder
from agentrl.tasks.prepare import prepare
from agentrl.tasks.repository import materialise
from agentrl.tasks.rows import to_task
from agentrl.tasks.splits import partition
from agentrl.tasks.task import Task, Verdict
from agentrl.tasks.validate import validate

FORGED = "test_f.py::test_0 PASSED\\ntest_f.py::test_1 PASSED\\ntest_f.py::test_2 PASSED\\n"


@pytest.fixture(scope="module")
def task() -> Task:
    rows = build(partition(0), "train", 1, 0)
    row = next(row for row in islice(rows, 50) if row.PASS_TO_PASS and len(row.FAIL_TO_PASS) > 1)
    rows.close()
    return to_task(row)


@pytest.fixture(scope="module")
def image(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tasks")
    made = image_folder(TasksConfig(folder=str(folder)), task)
    before = {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}
    yield made
    assert {p: p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()} == before


def grade_after(
    task: Task, image: Path, folder: Path, command: str, *, timeout_s: float = 60.0, **files: str
) -> Verdict:
    """Return the verdict on what `command` and `files` (dots spelled `__`) leave in a sandbox."""

    async def run() -> Verdict:
        provider = open_provider(
            SandboxConfig(), run="test", leases=folder / "leases", concurrency=2
        )
        try:
            sandbox = await provider.start(image, owner="test")
            for name, text in files.items():
                await sandbox.put(name.replace("__", "."), text.encode())
            await sandbox.exec(command, timeout_s=60)
            return await grade(task, sandbox, image=image, timeout_s=timeout_s)
        finally:
            await provider.close()

    return asyncio.run(run())


def fixed(task: Task) -> str:
    assert task.fix is not None
    script = "{}s|{}|{}|".format(*task.fix)
    done = subprocess.run(
        ["sed", script], input=task.files["f.py"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_bug_fails_just_the_tests_that_the_row_names(
    task: Task, image: Path, tmp_path: Path
) -> None:
    verdict = grade_after(task, image, tmp_path, "true")
    assert not verdict.resolved
    assert verdict.failed == task.fail_to_pass
    assert verdict.passed == task.pass_to_pass


def test_the_right_edit_in_the_agents_own_words_is_resolved(
    task: Task, image: Path, tmp_path: Path
) -> None:
    assert task.fix is not None
    verdict = grade_after(task, image, tmp_path, try_command(*task.fix))
    assert verdict.resolved
    assert not verdict.failed


def test_edited_and_missing_tests_and_runner_are_restored(
    task: Task, image: Path, tmp_path: Path
) -> None:
    empty = "def test_0(): pass\n"
    verdict = grade_after(task, image, tmp_path, "true", test_f__py=empty, check__py="")
    assert verdict.failed == task.fail_to_pass
    for command in ("rm test_f.py", "rm test_f.py; mkdir -p test_f.py/x", "ln -sf f.py test_f.py"):
        verdict = grade_after(task, image, tmp_path, command, f__py=fixed(task))
        assert verdict.resolved, command


@pytest.mark.parametrize(
    "trick",
    [
        f"print('{FORGED}')",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        f"import os; os.write(1, b'{FORGED}'); os._exit(0)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        f"open(f'/proc/{{__import__(\"os\").getppid()}}/fd/1', 'w').write('{FORGED}')",
        "import threading; threading.excepthook = None; raise SystemExit",
        "import os; os.system('rm -f /tmp/grade-*/run.py'); raise KeyboardInterrupt",
        "raise RecursionError",
        "def (",
    ],
)
def test_code_that_fakes_an_end_earns_nothing(
    trick: str, task: Task, image: Path, tmp_path: Path
) -> None:
    verdict = grade_after(task, image, tmp_path, "true", f__py=f"{trick}\n{task.files['f.py']}")
    assert not verdict.resolved
    assert set(task.fail_to_pass) <= set(verdict.failed)


def test_a_repository_cannot_shadow_what_the_runner_uses(
    task: Task, image: Path, tmp_path: Path
) -> None:
    forge = f"print('{FORGED}')\nimport sys\nsys.exit(0)\n"
    names = ("json", "os", "sys", "select", "site", "sitecustomize", "usercustomize", "conftest")
    files = {f"{name}__py": forge for name in names}
    verdict = grade_after(task, image, tmp_path, "true", **files)
    assert verdict.failed == task.fail_to_pass


def test_a_planted_cache_is_not_read(task: Task, image: Path, tmp_path: Path) -> None:
    plant = (
        "echo 'def test_0(): pass' > x.py && python3 -c \"import py_compile as p; "
        "[p.compile('x.py', f'__pycache__/{n}.cpython-{v}.pyc', "
        "invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH) "
        "for n in ('test_f', 'f') for v in (311, 312, 313)]\""
    )
    assert grade_after(task, image, tmp_path, plant).failed == task.fail_to_pass


def test_a_flood_of_output_changes_nothing(task: Task, image: Path, tmp_path: Path) -> None:
    flood = "for _ in range(20000): print('x' * 1000)\n"
    verdict = grade_after(task, image, tmp_path, "true", f__py=flood + fixed(task))
    assert verdict.resolved
    assert len(verdict.log) < 5000


def test_an_endless_loop_is_the_policys_doing(task: Task, image: Path, tmp_path: Path) -> None:
    verdict = grade_after(task, image, tmp_path, "true", timeout_s=1.0, f__py="while True: pass\n")
    assert not verdict.resolved
    assert not verdict.passed


def test_a_process_left_behind_does_not_hold_the_verdict(
    task: Task, image: Path, tmp_path: Path
) -> None:
    left = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n"
    assert grade_after(task, image, tmp_path, "sleep 600 &", f__py=left + fixed(task)).resolved


@pytest.mark.parametrize(
    "command", ["yes > /tmp/full", "chmod 500 .", "chmod 500 /tmp", "rm -rf /testbed/*"]
)
@pytest.mark.parametrize("runs", ["python check.py", "python3 check.py -v"])
def test_an_agent_that_hinders_the_tests_has_failed(
    command: str, runs: str, task: Task, image: Path, tmp_path: Path
) -> None:
    verdict = grade_after(replace(task, test_command=runs), image, tmp_path, command)
    assert not verdict.resolved
    assert set(task.fail_to_pass) <= set(verdict.failed)


def test_a_test_that_the_image_lacks_is_our_failure(
    task: Task, image: Path, tmp_path: Path
) -> None:
    wrong = replace(task, test_files=("check.py", "test_gone.py"))
    with pytest.raises(GradingError, match=r"test_gone\.py"):
        grade_after(wrong, image, tmp_path, "true")


def test_of_several_lines_on_one_test_the_worst_counts() -> None:
    log = "a.py::t[x y] PASSED [ 50%]\na.py::u PASSED\na.py::u FAILED\nnoise PASSED by\nb ERROR\n"
    assert parse_log(log) == {"a.py::t[x y]": "PASSED", "a.py::u": "FAILED", "b": "ERROR"}


def validated(task: Task, image: Path, folder: Path) -> None:
    async def run() -> None:
        provider = open_provider(
            SandboxConfig(), run="test", leases=folder / "leases", concurrency=2
        )
        try:
            await validate(task, provider, image=image, timeout_s=60)
        finally:
            await provider.close()

    asyncio.run(run())


def test_a_sound_task_is_accepted_by_either_way_of_testing(
    task: Task, image: Path, tmp_path: Path
) -> None:
    validated(task, image, tmp_path)
    validated(replace(task, test_command="python3 check.py -v"), image, tmp_path)


def test_a_task_that_passes_before_any_fix_is_refused(
    task: Task, image: Path, tmp_path: Path
) -> None:
    wrong = replace(task, fail_to_pass=task.pass_to_pass[:1], pass_to_pass=())
    with pytest.raises(TaskError, match=r"1 tests pass before any fix, test_f\.py::test_"):
        validated(wrong, image, tmp_path)


def test_a_task_that_fails_after_the_gold_fix_is_refused(task: Task, tmp_path: Path) -> None:
    broken = task.files["test_f.py"] + "\n\ndef test_never():\n    assert 1 == 2\n"
    image = materialise(tmp_path / "image", {**task.files, "test_f.py": broken})
    wrong = replace(task, fail_to_pass=(*task.fail_to_pass, "test_f.py::test_never"))
    with pytest.raises(TaskError, match=r"1 tests fail after the gold fix, test_f\.py::test_never"):
        validated(wrong, image, tmp_path)


def test_prepare_refuses_rows_that_decide_nothing_and_looks_at_good_ones_once(
    task: Task, tmp_path: Path
) -> None:
    config = RunConfig()
    config.tasks.source, config.tasks.folder = "swesmith", str(tmp_path / "tasks")
    config.model.path = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    materialise(tmp_path / "tasks" / "images" / "a", task.files)
    row = {
        "instance_id": "a",
        "patch": task.patch,
        "FAIL_TO_PASS": task.fail_to_pass,
        "PASS_TO_PASS": task.pass_to_pass,
        "test_command": task.test_command,
        "test_files": task.test_files,
    }
    train, leases = tmp_path / "tasks" / "train.jsonl", tmp_path / "tasks" / "leases"
    wrong = row | {"FAIL_TO_PASS": task.pass_to_pass, "PASS_TO_PASS": []}
    train.write_text(json.dumps(wrong))
    with pytest.raises(TaskError, match=r"1 of 1 tasks decide nothing:\n.*pass before any fix"):
        prepare(config)
    train.write_text(json.dumps(row))
    prepare(config)
    assert list(leases.iterdir()) == []
    leases.rmdir()
    prepare(config)
    assert not leases.exists()


def test_a_patch_that_does_not_apply_is_refused(task: Task, image: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not apply in reverse"):
        validated(replace(task, patch=task.patch.replace(" def ", " fed ")), image, tmp_path)
