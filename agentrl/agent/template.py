"""A model's chat template as literal frames, found once by rendering sentinels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.agent.toolcall import BASH_TOOL
from agentrl.errors import TemplateError

Message = dict[str, Any]
SENTINEL = "⟦content⟧"
SPACE = " \n "


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The literal pieces around some contents, one more than there are contents."""

    pieces: tuple[str, ...]
    is_trimmed: tuple[bool, ...]
    """For each content: the template strips white space from both its ends."""

    def contents(self, messages: Sequence[Message]) -> list[str]:
        """Return the contents of `messages` as the template writes them."""
        found = [str(msg["content"]) for msg in messages]
        if not any(self.is_trimmed):
            return found
        pairs = zip(found, self.is_trimmed, strict=True)
        return [text.strip() if trims else text for text, trims in pairs]


class Renderer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


class ChatTemplate:
    """Renders conversations, and the text that a template puts around contents."""

    def __init__(self, renderer: Renderer, *, mode: str) -> None:
        self._renderer = renderer
        self._tools = [BASH_TOOL] if mode == "tool" else None
        self.has_string_arguments = mode == "tool" and self._takes_strings()

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the text of `messages`, with the next generation prompt if `prompt`."""
        plain = [{key: msg[key] for key in msg if key != "extra"} for msg in messages]
        try:
            text = self._renderer.apply_chat_template(
                plain, tools=self._tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(str(msg["role"]) for msg in messages)
            raise TemplateError(
                f"the chat template refused a conversation of {roles}: {error}; "
                "take a template that bears it, or the other agent.mode"
            ) from error
        return str(text)

    def call_message(self, content: str, commands: Sequence[str]) -> Message:
        """Return the assistant message of a reply that calls the tool for each of `commands`."""
        calls = []
        for number, command in enumerate(commands):
            arguments: Any = {"command": command}
            if self.has_string_arguments:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": "bash", "arguments": arguments}
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def commands_of(self, message: Message) -> list[str]:
        """Return the commands that `call_message` was given."""
        arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
        trees = [json.loads(item) if isinstance(item, str) else item for item in arguments]
        return [tree["command"] for tree in trees]

    def initial_frame(self, roles: Sequence[str]) -> Frame:
        """Find the frame of a first prompt."""
        return _frame(
            roles, "the first prompt", lambda messages: self.render(messages, prompt=True)
        )

    def observation_frame(self, roles: Sequence[str], end_of_turn: str) -> Frame:
        """Find the frame of observations, from after the reply's end of turn on.

        Raises TemplateError when the template changes what stands before them.
        """
        where = f"an observation of {', '.join(roles)}"
        before = self._before(tools=sum(role == "tool" for role in roles))
        base = self.render(before)
        base = base[: base.rfind(end_of_turn) + len(end_of_turn)]

        def delta(messages: list[Message]) -> str:
            whole = self.render([*before, *messages], prompt=True)
            if whole.startswith(base):
                return whole[len(base) :]
            raise TemplateError(
                f"{where} changes the text before it: {difference(base, whole)}; take a template "
                "that keeps earlier turns (TRL's *_training ones do), or the other agent.mode"
            )

        return _frame(roles, where, delta)

    def close(self) -> str:
        """Return what the template writes after an assistant's content."""
        opening = self._before(tools=0)[:2]
        text = self.render([*opening, {"role": "assistant", "content": SENTINEL}])
        return text.partition(SENTINEL)[2]

    def _before(self, *, tools: int) -> list[Message]:
        opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        if tools:
            return [*opening, self.call_message("a", ["c"] * tools)]
        return [*opening, {"role": "assistant", "content": "a"}]

    def _takes_strings(self) -> bool:
        """Tell whether arguments given as a string come back as they were, not quoted again."""
        self.has_string_arguments = True
        opening = self._before(tools=1)
        try:
            return '{"command": "c"}' in self.render(opening)
        except TemplateError:
            return False


def difference(expected: str, found: str) -> str:
    """Say where two texts part."""
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((at for at, (one, two) in pairs if one != two), min(len(expected), len(found)))
    start = max(0, at - 30)
    return (
        f"from character {at} on, expected …{expected[start : at + 40]!r}, "
        f"found …{found[start : at + 40]!r}"
    )


def _message(role: str, content: str) -> Message:
    message = {"role": role, "content": content}
    return message | {"tool_call_id": "call_0", "name": "bash"} if role == "tool" else message


def _frame(roles: Sequence[str], where: str, text_of: Callable[[list[Message]], str]) -> Frame:
    """Split the text around sentinels; their spaces show whether the template trims."""
    contents = [f"{SPACE}{SENTINEL}{number};{SPACE}" for number in range(len(roles))]
    text = whole = text_of([_message(*pair) for pair in zip(roles, contents, strict=True)])
    pieces, is_trimmed = [], []
    for content in contents:
        is_trimmed.append(content not in text)
        before, found, text = text.partition(content.strip() if is_trimmed[-1] else content)
        if not found:
            raise TemplateError(
                f"{where}: the chat template changes or leaves out a message's content; it made "
                f"{whole!r} of {contents!r}; take one that writes contents as they are"
            )
        pieces.append(before)
    return Frame(pieces=(*pieces, text), is_trimmed=tuple(is_trimmed))
