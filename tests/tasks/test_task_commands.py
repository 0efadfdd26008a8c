"""`agentrl validate` and `agentrl grade`, over Harbor tasks whose tests are a line of shell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from task_forms import PROJECTS, write_form, write_harbor

from agentrl.config import RunConfig, TasksConfig
from agentrl.errors import ConfigError, TaskError
from launch import grade, plan, validate

SCRIPT = "grep -qF '{good}' /app/{path} && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is missing")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run's YAML; its splits are the first two projects to train on, the third to evaluate."""
    for split, projects in (("train", PROJECTS[:2]), ("held_out", PROJECTS[2:3])):
        for project in projects:
            folder = tmp_path / "tasks" / split / project.name
            write_harbor(project, folder)
            good = project.good.splitlines()[-1].strip()
            script = SCRIPT.format(good=good, path=project.path)
            (folder / "tests/test.sh").write_text(script)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"tasks: {{source: harbor, folder: {tmp_path}/tasks}}\n"
        "rollout: {concurrency: 2}\nevaluation: {split: held_out}\n"
    )
    return path


@needs_bubblewrap
def test_validation_names_the_faulty_and_the_rest_is_what_later_commands_see(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "tasks"
    always = "echo 1 > /logs/verifier/reward.txt\n"
    (folder / "train/lower/tests/test.sh").write_text(always)
    assert validate.main([str(config)]) == 0
    said = capsys.readouterr().out
    assert "train: 1 of 2 tasks can decide" in said
    assert "held_out: 1 of 1 tasks can decide" in said
    faults = json.loads((folder / "train.faults.json").read_bytes())
    assert list(faults) == ["lower"]
    assert "pass before any fix" in faults["lower"]
    assert grade.main([str(config), "gold", "--split", "train", "--out", f"{folder}/r.json"]) == 0
    assert json.loads((folder / "r.json").read_bytes())["resolved_ids"] == ["adder"]


@needs_bubblewrap
def test_a_split_of_which_no_task_can_decide_is_a_failure(config: Path) -> None:
    never = "echo 0 > /logs/verifier/reward.txt\n"
    (config.parent / "tasks/held_out/middle/tests/test.sh").write_text(never)
    assert validate.main([str(config), "--split", "held_out", "--repeats", "1"]) == 1


@needs_bubblewrap
def test_an_instance_in_both_splits_ends_validation(config: Path) -> None:
    folder = config.parent / "tasks"
    shutil.copytree(folder / "train/adder", folder / "held_out/adder")
    with pytest.raises(TaskError, match="1 tasks of held_out are in train too, as adder"):
        validate.main([str(config), "--repeats", "1"])


@needs_bubblewrap
def test_the_report_lies_beside_the_predictions(config: Path) -> None:
    preds = config.parent / "preds.json"
    rows = {"adder": {"instance_id": "adder", "model_patch": "no patch at all"}}
    preds.write_text(json.dumps(rows))
    assert grade.main([str(config), str(preds), "--split", "train"]) == 0
    found = json.loads((config.parent / "preds.report.json").read_bytes())
    assert (found["unresolved_ids"], found["incomplete_ids"]) == (["adder"], ["lower"])


@pytest.mark.parametrize("text", ["", '[{"id": 1}]', "3"])
def test_what_is_no_file_of_predictions_is_refused(config: Path, text: str) -> None:
    preds = config.parent / "preds.json"
    preds.write_text(text)
    with pytest.raises(ConfigError, match="no rows with instance_id and model_patch"):
        grade.main([str(config), str(preds), "--split", "train"])


def test_plan_tells_how_long_the_rows_own_images_take_to_pull(tmp_path: Path) -> None:
    write_form("swebench", tmp_path, PROJECTS[:2])
    tasks = TasksConfig(source="swebench", folder=str(tmp_path), environment="{image}")
    (line,) = plan.pulls(RunConfig(tasks=tasks))
    assert line.startswith("2 images are pulled, each once: 0.02 h")
    assert plan.pulls(RunConfig()) == []
