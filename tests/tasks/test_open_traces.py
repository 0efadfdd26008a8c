"""Published trajectories in the agent's own turns, and those that cannot be told so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
import agent_toys

from agentrl.agent.tokens import ChatTokens
from agentrl.agent.toolcall import parse
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.handoff.spool import list_spool, read_group
from agentrl.tasks.atif import sampled
from agentrl.tasks.open_traces import TraceRow, Unconvertible, command_of, convert
from launch import import_traces


def call(name: str, *, id: str = "", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "function": {"name": name, "arguments": json.dumps(arguments)}}


def says(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def tool(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **keys}


ROOT = Path(__file__).parents[2]
START = [
    {"role": "system", "content": "You are OpenHands."},
    {"role": "user", "content": "<issue_description>\nMend it.\n</issue_description>\nNow."},
]
END = [says("Done.", call("finish", message="ok"))]


def row(*messages: dict[str, Any]) -> TraceRow:
    return TraceRow(messages=[*START, *messages, *END], instance_id="a__b-1")


def test_a_trace_is_told_in_bash_and_its_thoughts_go_before_the_next_reply() -> None:
    ended = (
        "one\n[The command completed with exit code 2.]\n[Current working directory: /testbed]\n"
    )
    found = convert(
        row(
            says("I think.", call("think", thought="Deeply.")),
            tool("Your thought has been logged."),
            says("", call("execute_bash", command="ls"), call("execute_bash", command="pwd")),
            tool(ended),
            tool("/testbed\n[The command completed with exit code 0.]"),
        )
    )
    assert found.issue == "Mend it."
    first, last = found.turns
    assert first.text == "I think.\n\nDeeply."
    assert first.commands == ("ls", "pwd")
    assert first.outputs == (("one", 2), ("/testbed", 0))
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in last.commands[0]
    assert last.outputs == ()


def test_answers_with_ids_are_paired_by_them_in_any_order() -> None:
    calls = (call("bash", id="1", command="a"), call("bash", id="2", command="b"))
    answers = (tool("of b", tool_call_id="2"), tool("of a", tool_call_id="1"))
    assert convert(row(says("", *calls), *answers)).turns[0].outputs == (("of a", 0), ("of b", 0))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((says("", call("execute_bash", command="C-c", is_input="true")), tool("")), "input to a"),
        ((says("", call("browser", url="x")), tool("")), "tool browser"),
        ((says("", call("str_replace_editor", command="undo_edit")), tool("")), "undo_edit"),
        ((says("", call("execute_bash", command="ls")),), "a call without an answer"),
        ((says(""), tool("stray")), "an answer without a call"),
        ((says("", {"function": {"name": "bash", "arguments": "{"}}), tool("")), "no JSON"),
    ],
)
def test_what_cannot_be_told_has_a_reason(
    messages: tuple[dict[str, Any], ...], reason: str
) -> None:
    with pytest.raises(Unconvertible, match=reason):
        convert(row(*messages))


def test_a_trace_that_was_not_handed_in_teaches_nothing() -> None:
    with pytest.raises(Unconvertible, match="not handed in"):
        convert(TraceRow(messages=[*START, says("", call("bash", command="ls")), tool("x")]))


def test_the_editors_commands_do_in_bash_what_the_editor_did(tmp_path: Path) -> None:
    path = str(tmp_path / "it's a file.txt")

    def edit(**arguments: Any) -> str:
        command = command_of("str_replace_editor", {"path": path, **arguments})
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    edit(command="create", file_text="one\n$two `x`\nthree")
    assert Path(path).read_text() == "one\n$two `x`\nthree\n"
    edit(command="str_replace", old_str="$two `x`", new_str="'2'\n\"two\"")
    edit(command="insert", insert_line=1, new_str="between")
    assert Path(path).read_text() == "one\nbetween\n'2'\n\"two\"\nthree\n"
    assert "0 places hold" in edit(command="str_replace", old_str="four", new_str="")
    assert edit(command="view", view_range=[2, 3]).split() == ["2", "between", "3", "'2'"]
    assert "one" in edit(command="view")


@pytest.mark.parametrize("mode", ["tool", "text"])
def test_imported_traces_teach_replies_that_the_agent_itself_would_parse(
    mode: str, tmp_path: Path
) -> None:
    config = RunConfig()
    config.agent.mode, config.agent.tokens_per_trajectory = mode, 4096
    config.agent.prompts = str(ROOT / f"configs/agents/swebench{'_text' * (mode == 'text')}.yaml")
    config.model.path = str(agent_toys.make_tokenizer(tmp_path / "toy", agent_toys.template()))
    good = [*START, says("Look.", call("bash", command="ls")), tool("core.py"), *END]
    rows = [{"messages": good}, {"messages": good, "resolved": 0}, {"messages": START}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    count, left_out = import_traces.import_file(config, path, tmp_path / "traces")
    assert (count, left_out) == (1, {"not resolved": 1, "not handed in": 1})
    (trace,) = read_group(list_spool(tmp_path / "traces")[0]).trajectories
    tokens = ChatTokens.load(Path(config.model.path), mode=mode)
    texts = [tokens.decode(ids[:-1]) for ids, _ in sampled(trace)]
    action = import_traces.Maker.of(config).prompts.action
    found = [parse(text, mode=mode, action=action, is_thinking=False) for text in texts]
    assert [one.actions[0].command.split()[0] for one in found] == ["ls", "git"]
    assert found[0].content.startswith("Look.")
    assert "core.py" in tokens.decode(trace.tokens.tolist())


def test_traces_are_not_laid_over_others(tmp_path: Path) -> None:
    (tmp_path / "runs/x/sft/traces/0000").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "x.yaml").write_text(
        f"name: x\nruns_dir: {tmp_path}/runs\nmodel: {{path: {tmp_path}/model}}\n"
    )
    with pytest.raises(ConfigError, match="has traces already"):
        import_traces.main([str(tmp_path / "x.yaml"), str(tmp_path / "rows.jsonl")])
