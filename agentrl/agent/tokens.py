"""Text to tokens and back: the append-only buffer, and the deltas that go into it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.agent.template import ChatTemplate, Frame, Message
from agentrl.agent.toolcall import THINK
from agentrl.engine.base import Generation, VersionSpan
from agentrl.engine.experts import NO_EXPERTS, Experts
from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenBuffer:
    """One trajectory's tokens; what is in it never changes."""

    __slots__ = ("_experts", "_logprobs", "_mask", "known_experts", "tokens", "versions")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = list(prompt)
        self.versions: list[VersionSpan] = []
        """Spans over `tokens`; only sampled tokens are covered."""
        self._logprobs = array("d", bytes(8 * len(prompt)))
        self._mask = bytearray(len(prompt))
        self._experts: list[Experts] = []
        self.known_experts = 0
        """Positions, from the first on, whose experts are known."""

    def append_sampled(self, generation: Generation) -> None:
        """Append a reply as the engine gave it, mask on. Raises ValueError where it has gaps."""
        count = len(generation.token_ids)
        covered = [place for span in generation.versions for place in range(span.start, span.end)]
        if len(generation.logprobs) != count or covered != list(range(count)):
            raise ValueError(
                f"reply of {count} tokens from {generation.engine}: {len(generation.logprobs)} "
                f"log-probabilities, versions {generation.versions}; each token needs one of both"
            )
        offset = len(self._mask)
        if len(self.tokens) != offset:
            raise ValueError(
                f"{generation.engine} changed the prompt that it was lent: {len(self.tokens)} "
                f"tokens, {offset} were given; an engine must copy what it extends"
            )
        self.tokens.extend(generation.token_ids)
        self._logprobs.extend(generation.logprobs)
        self._mask.extend(b"\1" * count)
        self.versions.extend(
            VersionSpan(version=span.version, start=span.start + offset, end=span.end + offset)
            for span in generation.versions
        )
        if generation.experts is not None:
            self._append_experts(generation.experts, generation.engine)

    def _append_experts(self, experts: Experts, engine: str) -> None:
        self.known_experts += len(experts)
        if self.known_experts >= len(self.tokens):
            raise ValueError(
                f"{engine} gave experts of {self.known_experts} positions in a sequence of "
                f"{len(self.tokens)} tokens, the last of which was not computed yet"
            )
        if len(experts):
            self._experts.append(experts)

    def append_context(self, ids: Sequence[int]) -> None:
        """Append what the model did not sample, mask off."""
        self.tokens.extend(ids)
        self._logprobs.frombytes(bytes(8 * len(ids)))
        self._mask.extend(bytes(len(ids)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def logprobs(self) -> list[float]:
        """One a token; 0.0 where the mask is off."""
        return self._logprobs.tolist()

    @property
    def experts(self) -> Experts:
        """[tokens, layers, experts a token]; none where any is missing.

        Nothing was computed of the last token, which is in no loss: it has those of the one before.
        """
        if not self._experts or self.known_experts != len(self.tokens) - 1:
            return NO_EXPERTS
        return np.concatenate([*self._experts, self._experts[-1][-1:]])

    @property
    def loss_mask(self) -> list[bool]:
        return [bool(flag) for flag in self._mask]


class ChatTokens:
    """A model's tokenizer and chat template, proved append-only for one agent mode.

    For one thread: encoding an observation that spells a control token flips a switch of the
    tokenizer for the length of that call.
    """

    def __init__(self, tokenizer: Any, *, mode: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"{type(tokenizer).__name__} has no fast backend; "
                "the model folder needs tokenizer.json"
            )
        self._backend: Tokenizer = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = ChatTemplate(tokenizer, mode=mode)
        self.mode = mode
        self._special = _special(self._backend)
        self.end_of_turn = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = (self.end_of_turn,)
        if eos is not None and eos != self.end_of_turn:
            self.stop_ids += (int(eos),)
        self._end_text = self.decode([self.end_of_turn])
        opening = self.template.initial_frame(("system", "user"))
        self.opens_thinking = opening.pieces[-1].rstrip().endswith(THINK)
        """The generation prompt leaves a <think> open: a reply starts as thought."""
        self._initial: dict[tuple[str, ...], Frame] = {("system", "user"): opening}
        self._frames: dict[tuple[str, ...], Frame] = {}

    @classmethod
    def load(cls, folder: Path, *, mode: str) -> ChatTokens:
        """Read a model folder and prove its template. Raises TemplateError: which turn, and how."""
        # AutoTokenizer takes three times as long to import: it knows every model's own class, which
        # adds nothing to tokenizer.json where special tokens come from the template alone
        from transformers import PreTrainedTokenizerFast

        from agentrl.agent.selftest import prove

        if not (folder / "tokenizer.json").is_file():
            raise TemplateError(f"{folder}: no tokenizer.json; a fast tokenizer is needed")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{folder}: its tokenizer has no chat_template; put one into tokenizer_config.json "
                "or chat_template.jinja"
            )
        try:
            tokens = cls(tokenizer, mode=mode)
            prove(tokens)
        except TemplateError as error:
            raise TemplateError(f"{folder}, agent.mode={mode}: {error}") from error
        return tokens

    def initial(self, messages: Sequence[Message]) -> list[int]:
        """Return the first prompt, with the generation prompt at its end."""
        roles = tuple(msg["role"] for msg in messages)
        frame = self._initial.get(roles)
        if frame is None:
            frame = self._initial[roles] = self.template.initial_frame(roles)
        return self._fill(frame, messages)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Return what follows a reply's end of turn, up to the next generation prompt."""
        roles = tuple(msg["role"] for msg in messages)
        frame = self._frames.get(roles)
        if frame is None:
            frame = self.template.observation_frame(roles, self._end_text)
            self._frames[roles] = frame
        return self._fill(frame, messages)

    def encode(self, text: str) -> list[int]:
        """Tokenize `text`; control tokens that it spells become control tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens spelt out."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _fill(self, frame: Frame, messages: Sequence[Message]) -> list[int]:
        contents, pieces = frame.contents(messages), frame.pieces
        if self._special is None or not any(map(self._special.search, contents)):
            text = "".join(piece + text for piece, text in zip(pieces, contents, strict=False))
            return self.encode(text + pieces[-1])
        ids: list[int] = []
        for piece, content in zip(pieces, contents, strict=False):
            ids += self.encode(piece) + self._encode_plain(content)
        return ids + self.encode(pieces[-1])

    def _encode_plain(self, text: str) -> list[int]:
        """Tokenize text from outside: a control token that it spells stays mere text."""
        self._backend.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._backend.encode_special_tokens = False

    def _find_end_of_turn(self) -> int:
        tail = self.template.close()
        ids = self.encode(tail)
        special = _special_ids(self._backend)
        if not ids or ids[0] not in special or not tail.startswith(self.decode(ids[:1])):
            raise TemplateError(
                f"the chat template ends a reply by {tail!r}, which starts with no control token "
                "of the tokenizer; a turn must end by one, or the engine cannot know where to stop"
            )
        return ids[0]


def _special_ids(backend: Tokenizer) -> set[int]:
    return {number for number, token in _added(backend).items() if token.special}


def _special(backend: Tokenizer) -> re.Pattern[str] | None:
    words = [token.content for token in _added(backend).values() if token.special]
    return re.compile("|".join(map(re.escape, words))) if words else None


def _added(backend: Tokenizer) -> dict[int, Any]:
    return dict(backend.get_added_tokens_decoder())
