"""The same scripted replies through the real mini-swe-agent, side by side."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_toys import ScriptedEngine, ScriptedSandbox, block, make_task, ran

from agentrl import events as ev
from agentrl.agent.loop import run_agent
from agentrl.agent.prompts import Prompts
from agentrl.agent.record import SUBMIT
from agentrl.agent.tokens import ChatTokens
from agentrl.config import AgentConfig

UPSTREAM = """\
import json, sys, yaml
from pathlib import Path
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel
from minisweagent.models.utils.actions_text import parse_regex_actions

given = json.loads(sys.stdin.read())
config = yaml.safe_load(Path(given["yaml"]).read_text())
regex = r"```mswea_bash_command\\s*\\n(.*?)\\n```"

class Scripted(DeterministicModel):
    def query(self, messages, **kwargs):
        message = super().query(messages, **kwargs)
        template = config["model"]["format_error_template"]
        message["extra"]["actions"] = parse_regex_actions(
            message["content"], action_regex=regex, format_error_template=template,
            template_kwargs={"finish_reason": "stop"})
        return message

outputs = [{"role": "assistant", "content": text, "extra": {"cost": 0.0, "timestamp": 0.0,
            "response": {}}} for text in given["replies"]]
model = Scripted(outputs=outputs, cost_per_call=0.0,
                 observation_template=config["model"]["observation_template"])
agent = DefaultAgent(model, LocalEnvironment(cwd=given["cwd"]), **config["agent"])
agent.run(given["task"])
print(json.dumps(agent.serialize()))
"""
FORMAT_ERROR = "Give exactly one block; there were {{ actions | length }} ({{ finish_reason }})."
COMMANDS = {
    "echo one": ran("one\n"),
    "printf 'é\\n'; exit 3": ran("é\n", 3),
    f"printf '{SUBMIT}\\npatch\\n'": ran(f"{SUBMIT}\npatch\n"),
}


def upstream(path: Path, replies: list[str], folder: Path) -> dict[str, Any]:
    if importlib.util.find_spec("minisweagent") is None:
        pytest.skip("mini-swe-agent is not installed (the extra `benchmarks` brings it)")
    given = {"yaml": str(path), "replies": replies, "cwd": str(folder), "task": "Fix f."}
    quiet = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", UPSTREAM],
        input=json.dumps(given),
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | quiet,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def ours(path: Path, tokens: ChatTokens, replies: list[str]) -> dict[str, Any]:
    config = AgentConfig(max_turns=4, tokens_per_turn=500, tokens_per_trajectory=10_000)
    result = asyncio.run(
        run_agent(
            task=make_task("Fix f."),
            sandbox=ScriptedSandbox(dict(COMMANDS)),
            engine=ScriptedEngine(tokens, replies),
            tokens=tokens,
            prompts=Prompts.load(path),
            config=config,
            trajectory="0/0/0",
            events=ev.NoEvents(),
        )
    )
    return dict(json.loads(result.to_trajectory_json()))


def without_malformed_replies(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the one thing that we keep and mini-swe-agent does not."""
    after = [*messages[1:], {}]
    return [
        message
        for message, next_one in zip(messages, after, strict=True)
        if "interrupt_type" not in next_one.get("extra", {})
    ]


def keys_of(messages: list[dict[str, Any]]) -> list[tuple[list[str], list[str]]]:
    return [(sorted(message), sorted(message.get("extra", {}))) for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "status"),
    [
        ([block(command) for command in COMMANDS], "Submitted"),
        (["no block", block("echo one"), block("true") * 2, block(list(COMMANDS)[2])], "Submitted"),
        ([block("echo one")] * 4, "LimitsExceeded"),
        (["no"] * 3, "RepeatedFormatError"),
    ],
)
def test_a_trajectory_has_upstream_s_keys_and_contents(
    text_tokens: ChatTokens, odd_path: Path, replies: list[str], status: str
) -> None:
    shipped = Path(__file__).parents[2] / "configs/agents/swebench_text.yaml"
    tree = yaml.safe_load(shipped.read_text())
    tree["agent"]["step_limit"] = 4
    tree["model"]["format_error_template"] = FORMAT_ERROR
    path = odd_path / "both.yaml"
    path.write_text(yaml.safe_dump(tree))

    theirs, own = upstream(path, replies, odd_path), ours(path, text_tokens, replies)

    assert set(own) == set(theirs)
    assert set(own["info"]) == set(theirs["info"])
    assert set(own["info"]["config"]) == set(theirs["info"]["config"])
    assert set(own["info"]["config"]["agent"]) == set(theirs["info"]["config"]["agent"])
    for key in ("model_stats", "exit_status", "submission", "mini_version"):
        assert own["info"][key] == theirs["info"][key]
    assert own["info"]["exit_status"] == status
    assert own["trajectory_format"] == theirs["trajectory_format"]
    messages = without_malformed_replies(own["messages"])
    assert keys_of(messages) == keys_of(theirs["messages"])
    for mine, their in zip(messages, theirs["messages"], strict=True):
        assert (mine["role"], mine["content"]) == (their["role"], their["content"])
