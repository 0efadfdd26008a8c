"""Replies: tool calls, fenced blocks, and all that is neither."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent.prompts import ACTION_REGEX
from agentrl.agent.toolcall import parse

ACTION = re.compile(ACTION_REGEX, re.DOTALL)
PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "bash", "arguments": {"command": "ls"}}',
        '{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}',
        '"arguments": {',
        "{",
        "[" * 40,
        "```mswea_bash_command\n",
        "\n```",
        "ls",
        "\0",
        "\\ud800",
        '"',
        "9" * 30,
        "\n",
    ]
)


def calls(text: str) -> list[str]:
    return [action.command for action in parse(text, mode="tool", action=ACTION).actions]


def wrap(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@given(st.one_of(st.text(), st.lists(PIECES | st.text(max_size=3)).map("".join)))
def test_the_parser_never_raises(text: str) -> None:
    for mode in ("tool", "text"):
        reply = parse(text, mode=mode, action=ACTION)
        assert bool(reply.actions) != bool(reply.error)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_command_comes_through_a_tool_call(command: str) -> None:
    assert calls(wrap({"name": "bash", "arguments": {"command": command}})) == [command]


def test_several_calls_are_taken_in_order_and_the_text_before_is_content() -> None:
    first, second = (wrap({"name": "bash", "arguments": {"command": c}}) for c in ("a", "b"))
    reply = parse(f"I look.\n{first}\n{second}", mode="tool", action=ACTION)
    assert [action.command for action in reply.actions] == ["a", "b"]
    assert reply.content == "I look."


def test_a_command_may_spell_the_closing_tag() -> None:
    assert calls(wrap({"name": "bash", "arguments": {"command": "echo '</tool_call>'"}})) == [
        "echo '</tool_call>'"
    ]


def test_arguments_are_kept_as_the_model_wrote_them() -> None:
    text = '<tool_call>{"name":"bash","arguments":{ "command":"ls" }}</tool_call>'
    (action,) = parse(text, mode="tool", action=ACTION).actions
    assert action.arguments == '{ "command":"ls" }'


def test_arguments_given_as_a_string_are_read() -> None:
    assert calls(wrap({"name": "bash", "arguments": '{"command": "ls"}'})) == ["ls"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I think.", "no tool call"),
        ("<tool_call>{", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("<tool_call>[]</tool_call>", "must be an object"),
        (wrap({"name": "python", "arguments": {"command": "x"}}), "no tool 'python'"),
        (wrap({"name": "bash", "arguments": {}}), '"command"'),
        (wrap({"name": "bash", "arguments": {"command": 3}}), '"command"'),
        (wrap({"name": "bash", "arguments": "no json"}), "not valid JSON"),
        (wrap({"name": "bash", "arguments": {"command": "a\0b"}}), "NUL"),
        (wrap({"name": "bash", "arguments": {"command": "\ud800"}}), "surrogate"),
        (wrap({"name": "bash", "arguments": {"command": "x"}})[:-12], "must end with"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, reason: str) -> None:
    reply = parse(text, mode="tool", action=ACTION)
    assert reason in reply.error
    assert not reply.actions


def test_one_fenced_block_is_the_action() -> None:
    text = "THOUGHT: look.\n\n```mswea_bash_command\ncat <<'E'\n  x\nE\n```\n"
    (action,) = parse(text, mode="text", action=ACTION).actions
    assert action.command == "cat <<'E'\n  x\nE"


@pytest.mark.parametrize("count", [0, 2, 3])
def test_other_than_one_fenced_block_is_malformed(count: int) -> None:
    reply = parse("```mswea_bash_command\nls\n```\n" * count, mode="text", action=ACTION)
    assert f"found {count}" in reply.error
    assert reply.found == ("ls",) * count


def test_the_yaml_s_own_pattern_is_used() -> None:
    pattern = re.compile("<do>(.*?)</do>", re.DOTALL)
    assert parse("<do>\nls\n</do>", mode="text", action=pattern).actions[0].command == "ls"
