"""Published trajectories (Open-SWE-Traces, with OpenHands' tools) as the agent's own turns.

Those tools become commands of the one tool `bash`. What no command can do, as typing into a running
program, makes a trajectory unconvertible, with its reason. Observations often lack the id of their
call: each belongs to the next open one.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from agentrl.agent.record import SUBMIT

SHELLS = ("execute_bash", "bash", "terminal", "run_terminal_cmd")
EDITORS = ("str_replace_editor", "str_replace_based_edit_tool", "file_editor")
ENDS = ("finish", "submit")
SILENT = ("think", "task_tracker")
"""Tools that change nothing: what they say goes before the next reply."""
_EXIT = re.compile(r"\[(?:The command completed|Command finished) with exit code (-?\d+)\.?\]")
_NOISE = re.compile(
    r"^\[(?:The command completed|Command finished|Current working|Python interpreter|Command)"
    r"[^\n]*\]\n?|^OBSERVATION:\n|^EXECUTION RESULT of \[\w+\]:\n"
    r"|^Here's the result of running `cat -n`[^\n]*\n",
    re.MULTILINE,
)
_ISSUE = re.compile(r"<(issue_description|pr_description|issue)>(.*?)</\1>", re.DOTALL)
_REPLACE = """\
python3 - <<'{mark}'
import pathlib
path = pathlib.Path({path})
text = path.read_text()
old = {old}
assert text.count(old) == 1, f"{{text.count(old)}} places hold that text"
path.write_text(text.replace(old, {new}))
{mark}"""
_INSERT = """\
python3 - <<'{mark}'
import pathlib
path = pathlib.Path({path})
lines = path.read_text().splitlines(keepends=True)
lines.insert({line}, {new} + "\\n")
path.write_text("".join(lines))
{mark}"""


class Unconvertible(ValueError):
    """A trajectory that cannot be told in our terms; the text is the reason to count it under."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that matter; tools are named in the messages' calls."""

    messages: list[dict[str, Any]]
    instance_id: str = ""
    resolved: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One reply and what its commands gave."""

    text: str
    commands: tuple[str, ...]
    outputs: tuple[tuple[str, int], ...]
    """(output, exit code) of each; none for the command that hands in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTrace:
    instance_id: str
    issue: str
    turns: tuple[Turn, ...]


def convert(row: TraceRow) -> OpenTrace:
    """Return a row's trajectory in the agent's turns. Raises Unconvertible."""
    users = [message for message in row.messages if message["role"] == "user"]
    if not users:
        raise Unconvertible("no issue")
    issue = _text(users[0])
    inside = _ISSUE.search(issue)
    turns = _turns(row.messages)
    if not turns or SUBMIT not in turns[-1].commands[-1]:
        raise Unconvertible("not handed in")
    return OpenTrace(
        instance_id=row.instance_id,
        issue=(inside[2] if inside else issue).strip(),
        turns=tuple(turns),
    )


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    turns: list[Turn] = []
    said = ""
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, after in pairwise([*replies, len(messages)]):
        calls = messages[place].get("tool_calls") or []
        answers = _answers(calls, [m for m in messages[place + 1 : after] if m["role"] == "tool"])
        said = "\n\n".join(filter(None, (said, _text(messages[place]).strip())))
        commands, outputs = [], []
        for call, answer in zip(calls, answers, strict=True):
            name, arguments = _call(call)
            if name in SILENT:
                said = "\n\n".join(filter(None, (said, str(arguments.get("thought", "")).strip())))
                continue
            commands.append(command_of(name, arguments))
            if name in ENDS:
                break
            outputs.append(answer)
        if commands:
            turns.append(Turn(text=said, commands=tuple(commands), outputs=tuple(outputs)))
            said = ""
        if commands and SUBMIT in commands[-1]:
            break
    return turns


def command_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the command that does what a call of another harness's tool does."""
    if name in ENDS:
        return f"git add -A && echo {SUBMIT} && git diff --cached"
    if name in SHELLS:
        if str(arguments.get("is_input", "")).lower() == "true" or not arguments.get("command"):
            raise Unconvertible("input to a running program")
        return str(arguments["command"])
    if name in EDITORS:
        return _edit(arguments)
    raise Unconvertible(f"tool {name}")


def _edit(arguments: Mapping[str, Any]) -> str:
    what, path = arguments.get("command"), str(arguments.get("path", ""))
    mark = f"EOF_{secrets.token_hex(4)}" if "\nEOF\n" in f"\n{arguments}\n" else "EOF"
    if what == "view":
        span = arguments.get("view_range")
        return _view(path, json.loads(span) if isinstance(span, str) else span)
    if what == "create":
        return f"cat > {shlex.quote(path)} <<'{mark}'\n{arguments.get('file_text', '')}\n{mark}"
    values = {"mark": mark, "path": repr(path), "new": repr(arguments.get("new_str") or "")}
    if what == "str_replace":
        return _REPLACE.format(old=repr(arguments.get("old_str") or ""), **values)
    if what == "insert":
        return _INSERT.format(line=int(arguments["insert_line"]), **values)
    raise Unconvertible(f"editor command {what}")


def _view(path: str, span: Sequence[int] | None) -> str:
    name = shlex.quote(path)
    if span:
        end = span[1] if span[1] >= 0 else "$"
        return f"cat -n {name} | sed -n '{span[0]},{end}p'"
    if "." not in path.rpartition("/")[2]:
        return f"find {name} -maxdepth 2 -not -path '*/.*'"
    return f"cat -n {name}"


def _answers(
    calls: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, int]]:
    """Return each call's answer: by id where both have one, else the next in order."""
    by_id = {message["tool_call_id"]: message for message in tools if message.get("tool_call_id")}
    rest = deque(message for message in tools if not message.get("tool_call_id"))
    found = []
    for place, call in enumerate(calls):
        message = by_id.get(call.get("id", "")) or (rest.popleft() if rest else None)
        is_end = _call(call)[0] in ENDS and place == len(calls) - 1
        if message is None and not is_end:
            raise Unconvertible("a call without an answer")
        found.append(_output(_text(message)) if message else ("", 0))
    if rest:
        raise Unconvertible("an answer without a call")
    return found


def _output(text: str) -> tuple[str, int]:
    code = _EXIT.search(text)
    return _NOISE.sub("", text).strip("\n"), int(code[1]) if code else int(text[:6] == "ERROR:")


def _call(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise Unconvertible("arguments that are no JSON") from None
    return function["name"], arguments


def _text(message: Mapping[str, Any]) -> str:
    """Return a message's text; content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)
