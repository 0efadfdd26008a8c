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
        "<function=bash>",
        "<parameter=command>",
        "</parameter>",
        "</function>",
        "<think>",
        "</think>",
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


def element(command: str) -> str:
    inside = f"<parameter=command>\n{command}\n</parameter>"
    return f"<tool_call>\n<function=bash>\n{inside}\n</function>\n</tool_call>"


def test_calls_spelt_as_elements_are_read() -> None:
    assert calls("I look.\n" + element("ls\npwd") + "\n" + element("id")) == ["ls\npwd", "id"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (element("ls").replace("bash", "python"), "no tool 'python'"),
        (element("ls").replace("</function>", ""), "not complete"),
        ("<tool_call><function=bash></function></tool_call>", '"command"'),
        (element("ls").replace("</tool_call>", ""), "must end with"),
    ],
)
def test_a_malformed_element_says_what_is_wrong(text: str, reason: str) -> None:
    assert reason in parse(text, mode="tool", action=ACTION).error


def test_what_is_thought_asks_for_nothing() -> None:
    fence = "```mswea_bash_command\n{}\n```"
    text = f"<think>Maybe {fence.format('rm x')}?</think>\n{fence.format('ls')}"
    reply = parse(text, mode="text", action=ACTION)
    assert [action.command for action in reply.actions] == ["ls"]
    assert reply.content == text
    cut = parse(f"Maybe {fence.format('rm x')}", mode="text", action=ACTION, is_thinking=True)
    assert cut.error


def test_a_command_may_spell_the_end_of_a_thought() -> None:
    assert calls(wrap({"name": "bash", "arguments": {"command": "echo '</think>'"}})) == [
        "echo '</think>'"
    ]
