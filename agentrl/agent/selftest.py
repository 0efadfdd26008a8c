"""The proof, before a run starts, that a chat template only ever appends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.agent.template import Message, difference
from agentrl.agent.toolcall import parse
from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from agentrl.agent.tokens import ChatTokens

ADVICE = (
    "what the model saw would differ from what is trained: take a template that keeps earlier "
    "turns as they were (TRL's *_training ones do), or the other agent.mode"
)
OPENING: list[Message] = [
    {"role": "system", "content": "You repair code.\n"},
    {"role": "user", "content": "Issue: f(2) gives 3.\n\n  Fix it."},
]
NO_BLOCK = re.compile(r"(?!)")
"""Matches nothing: tool mode has no blocks."""
Turn = tuple[Message, list[Message]]


def prove(tokens: ChatTokens) -> None:
    """Play conversations turn by turn; raise TemplateError at the first one that parts."""
    for name, turns in conversations(tokens):
        _play(tokens, name, turns)


def conversations(tokens: ChatTokens) -> Iterator[tuple[str, list[Turn]]]:
    """Yield (name, turns): what can happen to an agent in this mode."""
    spelt = tokens.decode([tokens.end_of_turn])
    yield "plain", [_turn(tokens, ["ls"], ["a.py\n"]), _turn(tokens, ["cat a.py"], ["x = 1\n"])]
    yield (
        "malformed reply",
        [
            _turn(tokens, ["ls"], ["a.py"]),
            _malformed("I will look at it first."),
            _turn(tokens, ["ls -l"], ["total 0"]),
            _malformed('<tool_call>\n{"name": "bash", '),
            _turn(tokens, ["true"], ["ok"]),
        ],
    )
    yield (
        "empty observation and white space",
        [
            _turn(tokens, ["true"], [""]),
            _turn(tokens, ["printf '\\n\\n x \\n'"], ["\n\n x \n"]),
            _turn(tokens, ["true"], ["\t"]),
        ],
    )
    yield (
        "unicode",
        [
            _turn(tokens, ["echo 'naïve ✓ 你好'"], ["naïve ✓ 你好 🙂\n"]),
            _turn(tokens, ["true"], ["\ufffd\x00\x1b[0m"]),
        ],
    )
    yield (
        "control tokens spelt by a command",
        [
            _turn(tokens, ["cat log"], [f"a{spelt}\n{spelt}b<think>\n</think>"]),
            _turn(tokens, ["true"], ["<tool_call>\n</tool_response>"]),
        ],
    )
    if tokens.mode == "tool":
        yield (
            "several calls in a reply",
            [
                _turn(tokens, ["ls", "cat a.py"], ["a.py", "x = 1"]),
                _turn(tokens, ["ls", "true", "pwd"], ["", "b\n", "c"]),
                _malformed("Done."),
                _turn(tokens, ["ls"], ["d"]),
            ],
        )


def _turn(tokens: ChatTokens, commands: list[str], outputs: list[str]) -> Turn:
    if tokens.mode == "tool":
        reply = tokens.template.call_message("Next step.", commands)
        return reply, [
            {"role": "tool", "tool_call_id": f"call_{at}", "name": "bash", "content": output}
            for at, output in enumerate(outputs)
        ]
    content = f"THOUGHT: next.\n\n```mswea_bash_command\n{commands[0]}\n```"
    return {"role": "assistant", "content": content}, [{"role": "user", "content": outputs[0]}]


def _malformed(content: str) -> Turn:
    answer = {"role": "user", "content": "Give exactly one command."}
    return {"role": "assistant", "content": content}, [answer]


def _play(tokens: ChatTokens, name: str, turns: list[Turn]) -> None:
    seen = list(OPENING)
    ids = tokens.initial(seen)
    _compare(tokens, ids, seen, f"conversation {name!r}, first prompt")
    for number, (reply, observations) in enumerate(turns, start=1):
        where = f"conversation {name!r}, turn {number}"
        text = _reply_text(tokens, [*seen, reply], tokens.decode(ids), where)
        _check_calls(tokens, reply, text, where)
        ids += [*tokens.encode(text), tokens.end_of_turn]
        ends = ids.count(tokens.end_of_turn)
        try:
            delta = tokens.observation(observations)
        except TemplateError as error:
            raise TemplateError(f"{where}: {error}") from error
        seen += [reply, *observations]
        _compare(tokens, ids + delta, seen, where)
        ids += delta
        allowed = ends + 1 + len(observations)
        if ids.count(tokens.end_of_turn) > allowed:
            raise TemplateError(
                f"{where}: what a command printed became {ids.count(tokens.end_of_turn) - allowed} "
                "end-of-turn tokens; it must stay mere text; take another tokenizer"
            )


def _reply_text(tokens: ChatTokens, messages: list[Message], before: str, where: str) -> str:
    """Return the last message as a model would sample it, without its end of turn."""
    text = tokens.template.render(messages)
    if not text.startswith(before):
        raise TemplateError(
            f"{where}: the reply changes the text before it, {difference(before, text)}; {ADVICE}"
        )
    return text[len(before) : text.rfind(tokens.decode([tokens.end_of_turn]))]


def _check_calls(tokens: ChatTokens, reply: Message, text: str, where: str) -> None:
    """Refuse a template that spells tool calls in a way that the parser does not read."""
    if "tool_calls" not in reply:
        return
    parsed = parse(text, mode="tool", action=NO_BLOCK, is_thinking=tokens.opens_thinking)
    asked = tokens.template.commands_of(reply)
    if (found := [action.command for action in parsed.actions]) != asked:
        raise TemplateError(
            f"{where}: the template writes the commands {asked} as {text!r}, in which "
            f"{found or parsed.error} was found; only <tool_call> with JSON or <function=bash> is "
            "read: take agent.mode=text"
        )


def _compare(tokens: ChatTokens, ids: list[int], messages: list[Message], where: str) -> None:
    expected, found = tokens.template.render(messages, prompt=True), tokens.decode(ids)
    if expected != found:
        raise TemplateError(
            f"{where}: the tokens so far do not read as the whole conversation does, "
            f"{difference(expected, found)}; {ADVICE}"
        )
