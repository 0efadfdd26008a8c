"""One request inside the embedded engine: what was asked, and how far it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import RequestRefused


class SamplingParams(msgspec.Struct, kw_only=True):
    """SGLang's `sampling_params`, the part that is honoured; other keys are ignored, as there."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of POST /generate."""

    input_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = -1
    extra_key: str | None = None
    stream: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """Lives on the compute thread once submitted."""

    rid: str
    prompt: NDArray[np.int64]
    params: SamplingParams
    extra_key: str
    stop_ids: frozenset[int]
    deliver: Callable[[Answer], None]
    """Called once, on the compute thread, with the end."""
    seed: int = 0
    received: float = field(default_factory=time.time)
    tokens: NDArray[np.int64] = field(init=False)
    """Prompt and what was sampled, as known while the request has no row."""
    logprobs: NDArray[np.float32] = field(init=False)
    """One per sampled token."""
    cached: int = 0
    retractions: int = 0
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(version, first output token that it sampled), one for each change."""

    def __post_init__(self) -> None:
        self.tokens = self.prompt
        self.logprobs = np.zeros(0, dtype=np.float32)
        wanted = self.params.sampling_seed
        self.seed = int.from_bytes(os.urandom(8), "little") if wanted is None else wanted % 2**64

    def mark(self, version: str, sampled: int) -> None:
        """Note that tokens from output index `sampled` on come from `version`."""
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, sampled))

    def spans(self) -> list[dict[str, str | int]]:
        """Return weight_versions: spans over the output, without a gap."""
        total = len(self.tokens) - len(self.prompt)
        ends = [start for _, start in self.marks[1:]] + [total]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.marks, ends, strict=True)
            if start < end
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    finish: dict[str, object]
    """SGLang's finish_reason."""
    version: str


def check_body(body: GenerateBody, *, context: int, vocabulary: int) -> None:
    """Refuse what cannot be answered, in SGLang's words where it has some."""
    count, params = len(body.input_ids), body.sampling_params
    if not count:
        raise RequestRefused("input_ids is empty: give at least one token")
    if count >= context:
        raise RequestRefused(
            f"The input ({count} tokens) is longer than the model's context length "
            f"({context} tokens)."
        )
    if params.max_new_tokens < 0:
        raise RequestRefused(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    if count + params.max_new_tokens > context:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {count + params.max_new_tokens} tokens: {count} "
            f"tokens from the input messages and {params.max_new_tokens} tokens for the completion."
        )
    if params.temperature < 0 or not 0 < params.top_p <= 1:
        raise RequestRefused(
            f"temperature={params.temperature}, top_p={params.top_p}: temperature must be 0 or "
            "more, top_p over 0 and at most 1"
        )
    low, high = min(body.input_ids), max(body.input_ids)
    if low < 0 or high >= vocabulary:
        raise RequestRefused(
            f"input_ids hold {low if low < 0 else high}: ids must be 0 to {vocabulary - 1}"
        )
    start = body.logprob_start_len
    if start is not None and 0 <= start < count and body.return_logprob:
        raise RequestRefused(
            f"logprob_start_len={start}: the embedded engine gives output log-probabilities only; "
            "send -1"
        )
    if body.stream:
        raise RequestRefused("stream=true: the embedded engine does not stream; send false")
