"""Trajectories leave in the forms that other tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import RecordError
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.tasks.atif import to_atif
from launch import export


def seen(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "extra": {"raw_output": content, "timestamp": 2.0}}


MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {
        "role": "assistant",
        "content": "both",
        "extra": {
            "timestamp": 0.0,
            "actions": [{"command": "a", "tool_call_id": "c1"}, {"command": "b"}],
        },
    },
    seen("of a"),
    seen("of b"),
    {"role": "assistant", "content": "malformed", "extra": {"actions": []}},
    {"role": "user", "content": "a block, please", "extra": {"interrupt_type": "FormatError"}},
    {"role": "exit", "content": "", "extra": {"exit_status": "LimitsExceeded"}},
]


@pytest.fixture
def trajectory() -> Trajectory:
    mask = [False, False, True, True, False, True]
    return Trajectory(
        run="r", draw=3, task_id="a/b 1", attempt=0, node=0, tokens=np.arange(6),
        logprobs=np.array([0, 0, -0.5, -0.25, 0, -1.0]), loss_mask=np.array(mask),
        reward=0.0, cause="turn_limit", turns=2,
        messages=json.dumps({"messages": MESSAGES, "trajectory_format": "mini-swe-agent-1.1"}),
    )  # fmt: skip


def test_each_reply_has_its_calls_what_they_gave_and_its_very_tokens(
    trajectory: Trajectory,
) -> None:
    made = to_atif(trajectory, model="m")
    assert [step["source"] for step in made["steps"]] == [
        "system",
        "user",
        "agent",
        "agent",
        "user",
    ]
    assert [step["step_id"] for step in made["steps"]] == [1, 2, 3, 4, 5]
    first, second = made["steps"][2:4]
    assert [call["arguments"]["command"] for call in first["tool_calls"]] == ["a", "b"]
    assert first["observation"]["results"] == [
        {"content": "of a", "source_call_id": "c1"},
        {"content": "of b", "source_call_id": "call_3_1"},
    ]
    assert first["metrics"]["completion_token_ids"] == [2, 3]
    assert second["metrics"]["logprobs"] == [-1.0]
    assert first["timestamp"] == "1970-01-01T00:00:00+00:00"
    assert "tool_calls" not in second
    assert made["final_metrics"]["total_completion_tokens"] == 3


def test_a_spool_is_exported_a_file_a_trajectory(trajectory: Trajectory, tmp_path: Path) -> None:
    SpoolWriter(tmp_path / "spool", 0).write(
        Group(draw=3, task_id="a/b 1", trajectories=(trajectory,))
    )
    assert export.main([str(tmp_path / "spool"), str(tmp_path / "mini")]) == 0
    assert export.main([str(tmp_path / "spool"), str(tmp_path / "atif"), "--form", "atif"]) == 0
    name = "a_b_1-3-0.traj.json"
    assert json.loads((tmp_path / "mini" / name).read_bytes())["messages"] == MESSAGES
    assert json.loads((tmp_path / "atif" / name).read_bytes())["schema_version"] == "ATIF-v1.7"
    with pytest.raises(RecordError, match="no groups there"):
        export.main([str(tmp_path / "none"), str(tmp_path / "out")])
