"""Rows and folders as people have them become tasks, or are refused with place and cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from task_forms import FORMS, PROJECTS, git, write_form, write_harbor

from agentrl.config import TasksConfig, load
from agentrl.errors import TaskError
from agentrl.tasks.images import later_commits
from agentrl.tasks.load import faults_file, image_folder, load_split
from agentrl.tasks.patches import applied, from_texts, touched
from agentrl.tasks.sample import leaked, stratified
from agentrl.tasks.swebench import read_swebench
from agentrl.tasks.task import Task

ADDER = PROJECTS[0]
CONFIGS = Path(__file__).parents[2] / "configs/tasks"


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_a_preset(form: str) -> None:
    assert load(CONFIGS / f"{form}.yaml").tasks.source == form


def made(form: str, folder: Path) -> TasksConfig:
    write_form(form, folder, (ADDER,))
    return TasksConfig(source=form, folder=str(folder))


def rows_of(config: TasksConfig) -> list[dict[str, object]]:
    lines = (Path(config.folder) / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_rows(config: TasksConfig, *rows: dict[str, object]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (Path(config.folder) / "train.jsonl").write_text(text)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_tests_the_fix_and_an_image_with_the_bug_alone(
    form: str, tmp_path: Path
) -> None:
    config = made(form, tmp_path)
    (task,) = load_split(config, "train")
    assert "adder is wrong" in task.problem_statement
    assert task.fail_to_pass
    assert task.gold or task.patch or task.solution
    testbed = image_folder(config, task) / "testbed"
    assert (testbed / ADDER.path).read_text() == ADDER.bad
    assert git(testbed, "log", "--oneline").count("\n") == 1
    assert later_commits(testbed) == 0


def test_a_row_of_swe_bench_hides_its_new_tests_until_grading(tmp_path: Path) -> None:
    config = made("swebench", tmp_path)
    (task,) = load_split(config, "train")
    testbed = image_folder(config, task) / "testbed"
    assert "test_added" not in (testbed / "tests/test_adder.py").read_text()
    assert task.test_files == ("tests/test_adder.py",)
    assert task.fail_to_pass == ("tests/test_adder.py::test_added",)
    assert task.test_command.endswith("tests/test_adder.py")
    assert task.image_name == "docker.io/swebench/sweb.eval.x86_64.lab_1776_adder-1:latest"


def test_a_row_of_r2e_gym_sorts_its_tests_by_what_they_said_before(tmp_path: Path) -> None:
    (task,) = load_split(made("r2egym", tmp_path), "train")
    assert (task.fail_to_pass, task.pass_to_pass) == (("test_added",), ("test_kept",))
    assert task.problem_statement == "adder is wrong"
    assert list(task.hidden_files) == ["r2e_tests/test_1.py"]


def test_a_harbor_folder_gives_its_words_in_terms_of_the_testbed(tmp_path: Path) -> None:
    (task,) = load_split(made("harbor", tmp_path), "train")
    assert task.problem_statement == "In /testbed, adder is wrong.\n"
    assert task.verifier is not None
    assert (task.verifier.timeout_s, task.verifier.workdir) == (60.0, "/app")
    assert (task.network, task.difficulty) == ("no-network", "easy")


def test_parquet_and_the_rows_of_nemo_gym_give_the_same_tasks(tmp_path: Path) -> None:
    config = made("swebench", tmp_path)
    plain, rows = load_split(config, "train"), rows_of(config)
    wrapped = {"metadata": {"instance_id": "x", "instance_dict": json.dumps(rows[0])}}
    write_rows(config, {"responses_create_params": wrapped, "agent_ref": {}})
    assert load_split(config, "train") == plain
    (tmp_path / "train.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert load_split(config, "train") == plain


def test_a_split_that_is_not_in_the_folder_is_fetched_once_from_its_data_set(
    tmp_path: Path,
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: `pip install datasets`")
    there = made("swebench", tmp_path / "there")
    config = TasksConfig(
        source="swebench", folder=str(tmp_path / "here"), dataset=str(tmp_path / "there")
    )
    (tmp_path / "there/repositories").rename(tmp_path / "repositories")
    with pytest.raises(TaskError, match="split none"):
        load_split(config, "none")
    assert load_split(config, "train") == load_split(there, "train")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["train.parquet"]
    (tmp_path / "there/train.jsonl").unlink()
    assert len(load_split(config, "train")) == 1


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("swesmith", {"patch": None}, r"train\.jsonl:1: not a row of SWE-smith.*patch"),
        ("swebench", {"FAIL_TO_PASS": "not a list"}, r"lab__adder-1: its tests are 'not a list'"),
        ("swesmith", {"framework": "pytst"}, r"framework='pytst': must be one of pytest, "),
        ("swebench", {"test_patch": " "}, r"lab__adder-1: its test_patch is empty"),
        ("r2egym", {"expected_output_json": "{"}, r"its JSON columns are not R2E-Gym's"),
    ],
)
def test_a_wrong_column_is_named(
    form: str, change: dict[str, object], said: str, tmp_path: Path
) -> None:
    config = made(form, tmp_path)
    write_rows(config, rows_of(config)[0] | change)
    with pytest.raises(TaskError, match=said):
        load_split(config, "train")


def test_rows_of_another_form_are_refused_by_the_column_they_lack(tmp_path: Path) -> None:
    config = made("swesmith", tmp_path)
    with pytest.raises(TaskError, match=r"not a row of SWE-bench: .*base_commit"):
        load_split(replace(config, source="swebench"), "train")


def test_missing_doubled_and_ambiguous_rows_are_refused(tmp_path: Path) -> None:
    config = made("swesmith", tmp_path)
    with pytest.raises(TaskError, match="no such file"):
        load_split(config, "test")
    (row,) = rows_of(config)
    write_rows(config, row, row)
    with pytest.raises(TaskError, match=r"two rows are lab__adder\.bug"):
        load_split(config, "train")
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(TaskError, match=r"train\.jsonl and train\.parquet"):
        load_split(config, "train")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tests/test.sh", None, r"has no tests/test\.sh"),
        (
            "task.toml",
            "[verifier]\ntimeout_sec = 'x'",
            r"task\.toml: not a task of Harbor.*timeout",
        ),
        ("task.toml", "[[steps]]\nname = 'a'", "tasks of several steps are not taken"),
        ("task.toml", "= 1", r"task\.toml: not a task of Harbor"),
    ],
)
def test_a_harbor_folder_that_lacks_something_is_named(
    name: str, text: str | None, said: str, tmp_path: Path
) -> None:
    config = made("harbor", tmp_path)
    path = tmp_path / "train/adder" / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(TaskError, match=said):
        load_split(config, "train")


def test_the_older_word_for_the_network_is_read_too(tmp_path: Path) -> None:
    write_harbor(ADDER, tmp_path / "train/a")
    (tmp_path / "train/a/task.toml").write_text(
        "version = '1.0'\n[environment]\nallow_internet = true"
    )
    (task,) = load_split(TasksConfig(source="harbor", folder=str(tmp_path)), "train")
    assert task.network == "public"


def test_an_image_that_cannot_be_made_says_what_to_put_where(tmp_path: Path) -> None:
    config = made("swebench", tmp_path)
    (task,) = load_split(config, "train")
    with pytest.raises(TaskError, match=r"lab__adder has no 0000.*fetch it there"):
        image_folder(config, replace(task, base_commit="0000"))
    (tmp_path / "repositories/lab__adder").rename(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match=r"git clone of lab/adder into .*repositories"):
        image_folder(config, task)


def test_a_rows_own_image_is_named_to_the_kinds_that_start_from_one(tmp_path: Path) -> None:
    config = replace(made("swesmith", tmp_path), environment="docker://{image}")
    (task,) = load_split(config, "train")
    image = image_folder(config, task)
    named = "docker://swebench/swesmith.x86_64.lab_1776_adder\n"
    assert (image / "environment").read_text() == named
    assert not (image / "testbed").exists()


def test_tasks_that_validation_faulted_are_left_out_until_the_file_is_gone(tmp_path: Path) -> None:
    write_form("swesmith", tmp_path, PROJECTS[:2])
    config = TasksConfig(source="swesmith", folder=str(tmp_path))
    first, second = load_split(config, "train")
    faults_file(config, "train").write_text(json.dumps({first.instance_id: "flaky"}))
    assert load_split(config, "train") == [second]
    assert load_split(config, "train", with_faults=True) == [first, second]
    faults_file(config, "train").write_text(
        json.dumps({first.instance_id: "", second.instance_id: ""})
    )
    with pytest.raises(TaskError, match="names every task"):
        load_split(config, "train")


def task(name: str, repo: str, difficulty: str = "") -> Task:
    return Task(
        instance_id=name, repo=repo, problem_statement=name, patch="", fail_to_pass=("a",),
        pass_to_pass=(), image_name="", difficulty=difficulty,
    )  # fmt: skip


def test_a_subset_keeps_each_repositorys_share_and_its_members_under_any_order() -> None:
    tasks = [
        task(f"t{n:02}", "big" if n < 60 else "small", "hard" if n % 3 else "") for n in range(90)
    ]
    taken = stratified(tasks, 30, seed=1)
    assert [sum(one.repo == repo for one in taken) for repo in ("big", "small")] == [20, 10]
    assert sum(one.difficulty == "hard" for one in taken) == 20
    assert {one.instance_id for one in stratified(tasks[::-1], 30, seed=1)} == {
        one.instance_id for one in taken
    }
    assert stratified(tasks, 30, seed=2) != taken
    assert stratified(tasks, 0, seed=1) == tasks


def test_an_instance_in_both_splits_is_found_under_another_id_too() -> None:
    trained = [task("a", "r1"), task("b", "r2")]
    evaluated = [
        task("c", "r1"),
        replace(task("z", "r2"), problem_statement=" b\n"),
        task("d", "r3"),
    ]
    assert leaked(trained, evaluated) == (["z"], ["r1", "r2"])


def test_a_patch_made_of_texts_applies_and_names_its_files() -> None:
    changes = [("a.py", "one\ntwo", "one\nthree"), ("new.py", "", "x\n"), ("old.py", "y\n", "")]
    patch = from_texts(changes)
    assert touched(patch) == ("a.py", "new.py", "old.py")
    before = {path: old.encode() for path, old, _ in changes if old}
    assert applied(patch, before) == {"a.py": b"one\nthree", "new.py": b"x\n", "old.py": None}
    with pytest.raises(TaskError, match="does not apply"):
        applied(patch, {"a.py": b"else\n"})


def test_a_patch_names_empty_binary_and_renamed_files_too(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name, data in (("old.py", b"a\n" * 9), ("pic.png", b"\0\1"), ("gone.py", b"x\n")):
        (tmp_path / name).write_bytes(data)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/__init__.py").write_text("")
    (tmp_path / "pic.png").write_bytes(b"\0\2\3")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "old.py").rename(tmp_path / "new.py")
    git(tmp_path, "add", "-A")
    patch = git(tmp_path, "diff", "--cached", "--binary", "-M")
    assert set(touched(patch)) == {"empty/__init__.py", "pic.png", "gone.py", "old.py", "new.py"}
    after = applied(patch, before)
    assert (after["empty/__init__.py"], after["pic.png"]) == (b"", b"\0\2\3")
    assert (after["gone.py"], after["old.py"], after["new.py"]) == (None, None, b"a\n" * 9)


def test_django_rows_are_run_by_its_own_runner_and_labels(tmp_path: Path) -> None:
    config = made("swebench", tmp_path)
    (row,) = rows_of(config)
    patch = str(row["test_patch"]).replace("tests/test_adder.py", "tests/auth/test_a.py")
    write_rows(config, row | {"repo": "django/django", "test_patch": patch})
    (found,) = read_swebench(tmp_path / "train.jsonl")
    assert found.test_command.endswith("--parallel 1 auth.test_a")
    assert found.framework == "unittest"
