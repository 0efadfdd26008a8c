"""Foreign tasks in real sandboxes: gold passes, nothing else does, whatever an agent tries."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from task_forms import FORMS, PROJECTS, Forms, git

from agentrl.errors import GradingError, TaskError
from agentrl.sandbox.base import Sandbox, SandboxProvider
from agentrl.tasks.extract import extract
from agentrl.tasks.load import load_split
from agentrl.tasks.patches import from_texts
from agentrl.tasks.predictions import EMPTY, GOLD, Graded, grade_all, read_predictions, report
from agentrl.tasks.task import Task
from agentrl.tasks.validate import apply_gold, validate, validate_each

ADDER = PROJECTS[0]
ADDED = "tests/test_adder.py::test_added"


@pytest.fixture(scope="module")
def task(forms: Forms) -> Task:
    return load_split(forms.config("swebench", ADDER), "train")[0]


@pytest.fixture(scope="module")
def image(forms: Forms, task: Task) -> Path:
    return forms.image(forms.config("swebench", ADDER), task)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_gold_patches_solve_every_task_and_empty_ones_none(form: str, forms: Forms) -> None:
    config = forms.run_config(form)
    tasks = load_split(config.tasks, "train")
    gold = report(tasks, asyncio.run(grade_all(config, tasks, GOLD)))
    empty = report(tasks, asyncio.run(grade_all(config, tasks, EMPTY)))
    assert (gold["resolved_instances"], gold["error_instances"]) == (6, 0), gold["details"]
    assert (empty["unresolved_instances"], empty["error_instances"]) == (6, 0), empty["details"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["swesmith", "harbor"])
def test_a_sound_task_of_either_kind_validates_twice_over(form: str, forms: Forms) -> None:
    config = forms.run_config(form, ADDER)
    tasks = load_split(config.tasks, "train")
    assert asyncio.run(validate_each(config, tasks, repeats=2)) == {}


CHEATS = {
    "edits the test": "echo 'def test_added(): pass\ndef test_kept(): pass' > tests/test_adder.py",
    "removes the test": "rm -r tests",
    "a conftest that passes all": (
        "printf 'import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n  out = yield\n"
        '  out.get_result().outcome = "passed"\n\' | tee conftest.py > tests/conftest.py'
    ),
    "settings without the plugin": "printf '[pytest]\naddopts=-p no:agentrl_report' > pytest.ini",
    "settings that skip the test": "printf '[tool:pytest]\naddopts = -k kept' > setup.cfg",
    "a pytest of its own": f"echo 'print(\"PASSED {ADDED}\")' > pytest.py",
    "a module that the runner imports": "echo 'import os; os._exit(0)' > argparse.py",
    "a site that is loaded first": "echo 'import os; os._exit(0)' > sitecustomize.py",
    "forged lines, then an end": (
        f"echo 'print(\"PASSED {ADDED}\\n1 passed in 0.1s\", flush=True); import os; os._exit(0)'"
        " > adder/core.py"
    ),
    "a pytest of the environment's": (
        f"echo 'print(\"PASSED {ADDED}\"); import os; os._exit(0)' > .deps/pytest/__main__.py; "
        "sed -i 's/return outcome/return None/' .deps/_pytest/runner.py; "
        "rm -rf .git/info; git add -A -f; rm -r .deps/_pytest/__pycache__"
    ),
    "a process left to undo the restoring": (
        "(while sleep 0.05; do echo 'def test_added(): pass' > tests/test_adder.py; done) &"
    ),
    "lines in the report": (
        f'echo \'import glob; f = print; line = "\\nPASSED {ADDED}\\n"\n'
        '[open(path, "a").write(line) for path in glob.glob("/tmp/grade-*/report")]\''
        " > adder/core.py"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_earns_nothing(cheat: str, task: Task, image: Path, forms: Forms) -> None:
    verdict = forms.graded(task, image, CHEATS[cheat])
    assert not verdict.resolved
    assert ADDED in verdict.failed


async def solve(sandbox: Sandbox) -> None:
    await sandbox.put(ADDER.path, ADDER.good.encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mess",
    [
        "rm -rf tests conftest.py; mkdir tests; ln -s /etc/passwd tests/test_adder.py",
        "printf '[pytest]\naddopts = --nothing-like-it' > tox.ini; echo x > tests/conftest.py",
        "git config core.fsmonitor 'exit 1'; git rm -rq --cached .; touch .git/index.lock",
        "chmod -R a-w tests; sleep 60 & yes > /dev/null &",
    ],
)
def test_a_right_fix_in_a_messed_up_tree_is_resolved(
    mess: str, task: Task, image: Path, forms: Forms
) -> None:
    async def act(sandbox: Sandbox) -> None:
        await solve(sandbox)
        await sandbox.exec(mess, timeout_s=60)

    verdict = forms.graded(task, image, act)
    assert verdict.resolved, verdict.log


@pytest.mark.slow
def test_what_the_code_prints_is_no_result_and_a_hang_is_the_policys_doing(
    task: Task, image: Path, forms: Forms
) -> None:
    hang = f"echo 'print(\"PASSED {ADDED}\"); import time; time.sleep(600)' > adder/core.py"
    verdict = forms.graded(task, image, hang, timeout_s=5)
    assert verdict.passed == ()
    assert "ran out of time" in verdict.log


def test_a_fix_may_change_a_file_of_settings_if_the_gold_does(
    task: Task, image: Path, forms: Forms
) -> None:
    spared = replace(task, gold=task.gold.replace("adder/core.py", "setup.cfg"), pass_to_pass=())
    skip = "printf '[tool:pytest]\naddopts = --co' > setup.cfg"
    assert "collected" in forms.graded(spared, image, skip).log
    assert not forms.graded(spared, image, skip).resolved


def test_a_broken_image_is_our_failure_and_not_the_policys(
    task: Task, image: Path, forms: Forms
) -> None:
    with pytest.raises(GradingError, match=r"exit 127"):
        forms.graded(replace(task, test_command="no-such-runner"), image)
    wrong = replace(task, test_patch=task.test_patch.replace("def test_kept", "def test_other"))
    with pytest.raises(GradingError, match="does not apply"):
        forms.graded(wrong, image)


@pytest.mark.slow
def test_a_flaky_test_is_found_by_repeating(forms: Forms, task: Task, image: Path) -> None:
    flaky = "def test_kept():\n    import os, pathlib\n    p = pathlib.Path('/tmp/seen')\n"
    flaky += "    seen = p.exists()\n    p.touch()\n    assert not seen\n"
    kept = replace(
        task,
        test_patch="",
        test_files=("tests/test_flaky.py",),
        test_command=task.test_command.replace("test_adder", "test_flaky"),
        fail_to_pass=("tests/test_flaky.py::test_kept",),
        pass_to_pass=(),
    )
    (image / "testbed/tests/test_flaky.py").write_text(flaky)
    try:
        with pytest.raises(TaskError, match="1 tests are flaky over 2 runs"):
            forms.with_provider(
                lambda provider: validate(kept, provider, image=image, timeout_s=60, repeats=2)
            )
    finally:
        (image / "testbed/tests/test_flaky.py").unlink()


def test_a_repository_that_holds_the_fix_in_a_later_commit_is_refused(
    forms: Forms, task: Task, tmp_path: Path
) -> None:
    clone = Path(forms.config("swebench", ADDER).folder) / "repositories/lab__adder"
    git(tmp_path, "clone", "-q", str(clone), "image/testbed")
    git(tmp_path / "image/testbed", "checkout", "-q", "-b", "work", task.base_commit)
    with pytest.raises(TaskError, match="reaches 1 commits beyond its own"):
        forms.with_provider(
            lambda provider: validate(task, provider, image=tmp_path / "image", timeout_s=60)
        )


def test_a_repository_is_brought_out_of_its_image_with_the_bug_and_without_its_git(
    forms: Forms, tmp_path: Path
) -> None:
    (task,) = load_split(forms.config("swesmith", ADDER), "train")
    clone = Path(forms.config("swesmith", ADDER).folder) / "repositories/lab__adder"
    git(tmp_path, "clone", "-q", str(clone), "whole/testbed")
    made = tmp_path / "made"

    class Elsewhere:
        """Starts from `whole`, as a container's kind starts from what `made` names."""

        def __init__(self, provider: SandboxProvider) -> None:
            self.provider = provider

        async def start(self, image: Path, *, owner: str) -> Sandbox:
            assert image == made
            return await self.provider.start(tmp_path / "whole", owner=owner)

    forms.with_provider(
        lambda provider: extract(task, Elsewhere(provider), image=made, timeout_s=60)
    )
    assert (made / "testbed" / ADDER.path).read_text() == ADDER.bad
    assert git(made / "testbed", "log", "--oneline").count("\n") == 1
    assert git(made / "testbed", "status", "--short") == ""


def harbor_verdict(
    forms: Forms,
    tmp_path: Path,
    script: str,
    act: str = "true",
    *,
    fresh: bool = True,
    timeout_s: float = 60.0,
) -> object:
    (task,) = load_split(replace(forms.config("harbor", ADDER), fresh_verifier=fresh), "train")
    assert task.verifier is not None
    (tmp_path / "test.sh").write_text(script)
    mine = replace(task, verifier=replace(task.verifier, folder=str(tmp_path)))
    image = forms.image(forms.config("harbor", ADDER), task)
    return forms.graded(mine, image, act, timeout_s=timeout_s).resolved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "solved"),
    [
        ("echo 1.0 > /logs/verifier/reward.txt", True),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", False),
        ('echo \'{"reward": 1, "style": 0}\' > /logs/verifier/reward.json', True),
        ("echo '{\"share\": 0.9}' > /logs/verifier/reward.json", False),
        ("kill -9 $$", False),
    ],
)
def test_a_verifiers_reward_decides(
    script: str, solved: bool, forms: Forms, tmp_path: Path
) -> None:
    planted = "mkdir -p /tmp/logs/verifier; echo 1 | tee /tmp/logs/verifier/reward.txt"
    assert harbor_verdict(forms, tmp_path, script, planted) is solved


def test_a_verifier_that_takes_too_long_has_not_solved(forms: Forms, tmp_path: Path) -> None:
    script = "echo 1 > /logs/verifier/reward.txt; sleep 600"
    assert harbor_verdict(forms, tmp_path, script, timeout_s=3) is False


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo done", "wrote no reward"),
        ("echo many > /logs/verifier/reward.txt", "holds 'many"),
        ("echo nan > /logs/verifier/reward.txt", "holds nan"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "no `reward` among a, b"),
    ],
)
def test_a_verifier_without_a_verdict_is_our_failure(
    script: str, said: str, forms: Forms, tmp_path: Path
) -> None:
    with pytest.raises(GradingError, match=said):
        harbor_verdict(forms, tmp_path, script)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_a_verifier_sees_the_repositorys_changes_alone_or_the_machine_as_it_was_left(
    fresh: bool, forms: Forms, tmp_path: Path
) -> None:
    script = "[ -e /app/new ] && [ -e /tmp/left ]; echo $((1 - $?)) > /logs/verifier/reward.txt"
    left = "touch /tmp/left; echo x > new"
    assert harbor_verdict(forms, tmp_path, script, left, fresh=fresh) is not fresh
    script = "[ -s /app/new ]; echo $((1 - $?)) > /logs/verifier/reward.txt"
    assert harbor_verdict(forms, tmp_path, script, left, fresh=fresh)


def test_a_task_that_wants_the_network_says_so_when_its_fix_fails(
    forms: Forms, task: Task, image: Path
) -> None:
    wanting = replace(task, network="public", gold=from_texts([("note.txt", "", "x\n")]))
    with pytest.raises(TaskError, match="asks for the network 'public', and a sandbox has none"):
        forms.with_provider(lambda provider: validate(wanting, provider, image=image, timeout_s=60))


@pytest.mark.slow
def test_predictions_are_graded_in_trees_of_their_own(forms: Forms, tmp_path: Path) -> None:
    config = forms.run_config("swesmith", *PROJECTS[:4])
    tasks = load_split(config.tasks, "train")
    first, second, third, fourth = (task.instance_id for task in tasks)
    solved = tasks[0].patch.replace("\n-", "\n@").replace("\n+", "\n-").replace("\n@", "\n+")
    rows = [(first, _reversed(tasks[0].patch)), (second, solved), (third, "")]
    path = tmp_path / "preds.jsonl"
    path.write_text(
        "".join(json.dumps({"instance_id": i, "model_patch": p}) + "\n" for i, p in rows)
    )
    found = report(tasks, asyncio.run(grade_all(config, tasks, read_predictions(path))))
    assert found["resolved_ids"] == [first]
    assert found["unresolved_ids"] == [second]
    assert "does not apply" in found["details"][second]
    assert found["empty_patch_ids"] == [third]
    assert found["incomplete_ids"] == [fourth]


def _reversed(patch: str) -> str:
    """Return a one-hunk patch the other way round, as a model would have written it."""
    head, sign, rest = patch.partition("@@")
    swapped = {"-": "+", "+": "-"}
    lines = [swapped.get(line[:1], line[:1]) + line[1:] for line in (sign + rest).splitlines()]
    removed = [line for line in lines if line.startswith("-")]
    added = [line for line in lines if line.startswith("+")]
    place = next(n for n, line in enumerate(lines) if line[:1] in swapped)
    kept = [line for line in lines if line[:1] not in swapped]
    return "\n".join([head.rstrip("\n"), *kept[:place], *removed, *added, *kept[place:], ""])


def test_a_report_counts_as_swe_bench_does() -> None:
    graded = [Graded(instance_id="a", outcome="resolved"), Graded(instance_id="b", outcome="error")]
    found = report([], graded)
    assert (found["resolved_instances"], found["error_instances"]) == (1, 1)
    assert (found["completed_ids"], found["schema_version"]) == (["a"], 2)


def test_a_gold_patch_that_does_not_apply_is_told_in_gits_words(
    forms: Forms, task: Task, image: Path
) -> None:
    wrong = replace(task, gold=task.gold.replace("core.py", "nowhere.py"))

    async def body(provider: SandboxProvider) -> None:
        await apply_gold(wrong, await provider.start(image, owner="test"), timeout_s=60)

    with pytest.raises(TaskError, match=r"gold patch does not apply: error: .*nowhere"):
        forms.with_provider(body)
