"""What a reply asks for: calls of the tool `bash`, or one fenced block. Never raises on a reply.

Two spellings of a call are read: Qwen2.5's and Qwen3's, a JSON object between <tool_call> tags,
and Qwen3-Coder's and Qwen3.5's, a <function=bash> element there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""The one tool, as mini-swe-agent declares it."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
_decoder = json.JSONDecoder()
_space = re.compile(r"\s*")
_element = re.compile(
    r"<function=([^>]*)>\s*(?:<parameter=command>\n?(.*?)\n?</parameter>\s*)?</function>", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    command: str
    arguments: str = ""
    """The JSON object as the model wrote it; empty in text mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A parsed reply: actions, or the reason why there are none."""

    content: str
    """The text, in tool mode without the calls."""
    actions: tuple[Action, ...] = ()
    error: str = ""
    """Why it is malformed; empty when it is not."""
    found: tuple[str, ...] = ()
    """Commands found in a malformed reply, for the template's `actions`."""
    has_tool_calls: bool = False


class _BadCall(ValueError):
    """One call that does not parse."""


def parse(text: str, *, mode: str, action: re.Pattern[str], is_thinking: bool = False) -> Reply:
    """Parse `text` by `mode`: `tool`, or `text` with the pattern `action`.

    What is thought (`is_thinking`: the prompt ended by <think>) asks for nothing.
    """
    start = 0
    if is_thinking or text.lstrip().startswith(THINK):
        end = text.find(THOUGHT)
        start = len(text) if end < 0 else end + len(THOUGHT)
    return _parse_calls(text, start) if mode == "tool" else _parse_block(text, start, action)


def _parse_block(text: str, start: int, action: re.Pattern[str]) -> Reply:
    found = tuple((match[action.groups] or "").strip() for match in action.finditer(text, start))
    if len(found) != 1:
        error = f"Expected exactly one action in the reply, found {len(found)}."
        return Reply(content=text, error=error, found=found)
    if problem := _unrunnable(found[0]):
        return Reply(content=text, error=problem, found=found)
    return Reply(content=text, actions=(Action(command=found[0]),))


def _parse_calls(text: str, start: int) -> Reply:
    first = text.find(OPEN, start)
    if first < 0:
        error = "The reply holds no tool call; every reply must hold at least one."
        return Reply(content=text, error=error)
    try:
        actions = tuple(_calls(text, first))
    except _BadCall as bad:
        return Reply(content=text, error=str(bad), has_tool_calls=True)
    # Templates put one newline between the text and the first call.
    return Reply(content=text[:first].removesuffix("\n"), actions=actions, has_tool_calls=True)


def _calls(text: str, at: int) -> Iterator[Action]:
    while at >= 0:
        start = _skip(text, at + len(OPEN))
        if text.startswith("<function=", start):
            action, end = _from_element(text, start)
        else:
            call, end = _object(text, start)
            action = _action(call, text[start:end])
        end = _skip(text, end)
        if not text.startswith(CLOSE, end):
            raise _BadCall(f"A tool call must end with {CLOSE} right after its arguments.")
        yield action
        at = text.find(OPEN, end)


def _from_element(text: str, at: int) -> tuple[Action, int]:
    match = _element.match(text, at)
    if match is None:
        raise _BadCall("The tool call's <function=bash> element is not complete.")
    call = {"name": match[1], "arguments": {"command": match[2]}}
    return _action(call, ""), match.end()


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Decode one JSON object; the decoder knows its end, so a command may spell a tag."""
    try:
        value, end = _decoder.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be decoded"
        raise _BadCall(f"The tool call is not valid JSON: {reason}.") from error
    if not isinstance(value, dict):
        raise _BadCall('The tool call must be an object with "name" and "arguments".')
    return value, end


def _action(call: dict[str, Any], source: str) -> Action:
    if (name := call.get("name")) != "bash":
        raise _BadCall(f"There is no tool {name!r:.80}; the only one is 'bash'.")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments, _ = _object(arguments, 0)
    if not isinstance(arguments, dict) or not isinstance(arguments.get("command"), str):
        raise _BadCall('The tool bash needs the argument "command", a string.')
    if problem := _unrunnable(arguments["command"]):
        raise _BadCall(problem)
    return Action(command=arguments["command"], arguments=_verbatim(source, arguments))


def _verbatim(source: str, arguments: dict[str, Any]) -> str:
    """Return the arguments as they stand in `source`, or serialised where that is ambiguous."""
    if key := re.search(r'"arguments"\s*:\s*(?=\{)', source):
        try:
            value, end = _object(source, key.end())
        except _BadCall:  # the match was inside another string
            return json.dumps(arguments, ensure_ascii=False)
        if value == arguments:
            return source[key.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def _unrunnable(command: str) -> str:
    """Say why no shell can take `command`; empty when one can."""
    if "\0" in command:
        return "The command holds a NUL character, which no shell takes."
    if not command.isascii():
        try:
            command.encode()
        except UnicodeEncodeError:
            return "The command holds half of a surrogate pair, which is no text."
    return ""


def _skip(text: str, at: int) -> int:
    match = _space.match(text, at)
    return match.end() if match else at
