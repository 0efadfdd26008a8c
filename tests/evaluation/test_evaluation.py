import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from rollout_toys import ToyAgent, ToyProvider, shop, task

from agentrl import evaluation
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, EngineLost, Interrupted
from agentrl.events import TrajectoryEvent
from agentrl.handoff.spool import list_spool, read_group

SETTINGS = {"split": "held_out", "temperature": 1.0, "attempts": 4, "bootstrap": 200, "model": "m"}
TASKS = [task(number) for number in range(6)]


def attempt_all(spool, todo=range(6), **parts):
    config = RunConfig()
    config.evaluation.attempts = 4
    made = shop(config, **parts)
    asyncio.run(evaluation.run_groups(made, TASKS, list(todo), spool, **parts.pop("more", {})))
    return made


def summary_of(spool):
    return evaluation.summarize(evaluation._read_all(spool, TASKS), TASKS, SETTINGS)


def test_an_evaluation_counts_what_the_tests_decided(tmp_path):
    made = attempt_all(tmp_path)
    found = summary_of(tmp_path)
    assert found["pass_at"]["1"]["value"] == 0.5
    assert found["pass_at"]["1"]["low"] < 0.5 < found["pass_at"]["1"]["high"]
    assert list(found["pass_at"]) == ["1", "2", "4"]
    assert found["per_task"] == {f"task-{number}": float(number % 2 == 0) for number in range(6)}
    assert found["causes"] == {"submitted": 24}
    assert set(found["repository"].values()) == {"r"}
    assert not found["difficulty"]
    ids = {event.trajectory for event in made.events.of(TrajectoryEvent)}
    assert "task-3/2/0" in ids
    json.dumps(found, allow_nan=False)


def test_failures_of_ours_are_counted_and_in_no_mean(tmp_path):
    lost = {f"task-0/1/{number}": EngineLost("gone") for number in range(3)}
    lost |= {f"task-1/{n}/{number}": EngineLost("gone") for n in range(4) for number in range(3)}
    attempt_all(tmp_path, agent=ToyAgent(errors=lost))
    found = summary_of(tmp_path)
    assert found["results"]["task-0"] == {"graded": 3, "solved": 3}
    assert found["ungraded"] == 5
    assert found["causes"]["engine_lost"] == 5
    assert "task-1" not in found["per_task"]
    assert found["pass_at"]["1"]["value"] == pytest.approx(3 / 5)
    assert (found["pass_at"]["1"]["tasks"], found["pass_at"]["4"]["tasks"]) == (5, 4)


def test_an_interrupted_evaluation_goes_on_with_the_tasks_that_lack_attempts(tmp_path):
    lost = {f"task-0/1/{number}": EngineLost("gone") for number in range(3)}
    attempt_all(tmp_path, todo=[0, 1, 4], agent=ToyAgent(errors=lost))
    assert evaluation._unfinished(tmp_path, TASKS, 4) == [0, 2, 3, 5]
    agent = ToyAgent()
    attempt_all(tmp_path, todo=[0, 2, 3, 5], agent=agent)
    assert len(agent.seen) == 16
    assert evaluation._unfinished(tmp_path, TASKS, 4) == []
    assert summary_of(tmp_path)["pass_at"]["4"]["value"] == 0.5


def test_a_stop_ends_an_evaluation_with_its_sandboxes_closed(tmp_path):
    provider, agent = ToyProvider(), ToyAgent(hold=24)
    made = shop(agent=agent, provider=provider)

    def check():
        if agent.held.is_set():
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        asyncio.run(evaluation.run_groups(made, TASKS, list(range(6)), tmp_path, check=check))
    assert provider.open == 0
    assert list_spool(tmp_path) == {}


def test_progress_is_told_up_to_the_last_task(tmp_path):
    told = []
    asyncio.run(
        evaluation.run_groups(
            shop(), TASKS, [2, 3], tmp_path, progress=lambda done, total: told.append((done, total))
        )
    )
    assert told[-1] == (6, 6)


def test_preds_has_mini_swe_agents_form(tmp_path):
    lost = {f"task-1/{n}/{number}": EngineLost("gone") for n in range(4) for number in range(3)}
    attempt_all(tmp_path, agent=ToyAgent(errors=lost))
    found = evaluation.predictions(evaluation._read_all(tmp_path, TASKS), "a model")
    assert found["task-0"] == {
        "model_name_or_path": "a model",
        "instance_id": "task-0",
        "model_patch": "diff --git a/x b/x\n",
    }
    assert found["task-1"]["model_patch"] == ""
    assert len(found) == 6


def test_a_folder_of_another_evaluation_is_refused(tmp_path):
    config, model = RunConfig(), tmp_path / "model"
    model.mkdir()
    evaluation._claim(tmp_path, evaluation._settings(config, model, TASKS))
    evaluation._claim(tmp_path, evaluation._settings(config, model, TASKS))
    config.evaluation.temperature = 0.5
    with pytest.raises(ConfigError, match="begun with another temperature"):
        evaluation._claim(tmp_path, evaluation._settings(config, model, TASKS))


def test_evaluated_trajectories_are_ordinary_spool_files(tmp_path):
    attempt_all(tmp_path)
    assert read_group(list_spool(tmp_path)[3]).task_id == "task-3"
