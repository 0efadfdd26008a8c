"""Rows, patches, task folders and images cannot name files of this host outside of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from task_forms import PROJECTS, git, write_form

from agentrl.config import TasksConfig
from agentrl.errors import GradingError, TaskError
from agentrl.tasks.harbor import copy_environment
from agentrl.tasks.images import made
from agentrl.tasks.load import load_split
from agentrl.tasks.patches import touched
from agentrl.tasks.restore import plan
from agentrl.tasks.task import Task

SECRET = "the key of this host\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/key").write_text(SECRET)
    return tmp_path / "host/key"


def task(**changes: object) -> Task:
    made = Task(
        instance_id="a", repo="a", problem_statement="", patch="", fail_to_pass=("t",),
        pass_to_pass=(), image_name="", test_files=("check.py",), test_command="x",
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]  # what is wrong is the test


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "image/testbed").mkdir(parents=True)
    return tmp_path / "image"


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", "..", ".hidden", "a\0b", "a\nb"])
def test_an_id_that_would_lead_out_of_the_folder_of_images_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="its id must be letters"):
        task(instance_id=name)


@pytest.mark.parametrize("path", ["../../host/key", "a/../../host/key", "/host/key"])
def test_a_patch_that_names_a_file_outside_is_refused(path: str) -> None:
    with pytest.raises(TaskError, match="outside of its repository"):
        touched(f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n")


@pytest.mark.parametrize("name", ["check.py", "conftest.py"])
def test_a_link_out_of_an_image_is_not_followed(name: str, image: Path, secret: Path) -> None:
    (image / "testbed/check.py").write_text("")
    (image / "testbed" / name).unlink(missing_ok=True)
    (image / "testbed" / name).symlink_to(secret)
    with pytest.raises(GradingError, match=r"leads out of .*refused"):
        plan(task(), image)


@pytest.mark.parametrize(
    "line", ["COPY ../../../host/key /app/", "COPY src/link /app/", "COPY src /app/../../../out/"]
)
def test_a_harbor_task_copies_nothing_from_or_to_elsewhere(
    line: str, tmp_path: Path, secret: Path
) -> None:
    environment = tmp_path / "tasks/one/environment"
    (environment / "src").mkdir(parents=True)
    (environment / "src/link").symlink_to(secret)
    (environment / "Dockerfile").write_text(f"WORKDIR /app\n{line}\n")
    with pytest.raises(TaskError, match=r"leads out of .*refused"):
        copy_environment(environment.parent, tmp_path / "a/b/testbed")
    assert not (tmp_path / "out").exists()
    assert not any(
        SECRET in path.read_text() for path in (tmp_path / "a").rglob("*") if path.is_file()
    )


def test_a_verifier_of_its_own_environment_is_refused(tmp_path: Path) -> None:
    write_form("harbor", tmp_path, PROJECTS[:1])
    toml = tmp_path / "train/adder/task.toml"
    toml.write_text(
        toml.read_text().replace("[verifier]", "[verifier]\nenvironment_mode='separate'")
    )
    with pytest.raises(TaskError, match="only `shared`"):
        load_split(TasksConfig(source="harbor", folder=str(tmp_path)), "train")


def test_what_git_ignores_is_left_out_of_an_images_commit_but_for_what_the_task_names(
    tmp_path: Path,
) -> None:
    def fill(testbed: Path) -> None:
        testbed.mkdir(parents=True)
        for name in ("lib/fixed.py", "lib/built.so", ".venv/bin"):
            (testbed / name).parent.mkdir(exist_ok=True)
            (testbed / name).write_text("x\n")
        (testbed / ".gitignore").write_text("lib\n.venv\n")

    gold = "--- a/lib/fixed.py\n+++ b/lib/fixed.py\n@@ -1 +1 @@\n-x\n+y\n"
    folder = made(tmp_path / "image", task(gold=gold), fill, with_ignored=False) / "testbed"
    assert git(folder, "ls-files").split() == [".gitignore", "lib/fixed.py"]
    assert (folder / ".venv/bin").exists()
