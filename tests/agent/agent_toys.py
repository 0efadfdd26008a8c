"""Small real parts for the agent's tests: trained tokenizers, a scripted engine and sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.agent.tokens import ChatTokens
from agentrl.engine.base import Finish, Generation, Sampling, VersionSpan
from agentrl.sandbox.base import ExecResult
from agentrl.tasks.task import Task

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "You repair code. THOUGHT: next.\n\n```mswea_bash_command\nls -la\n```",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a.py"}}\n</tool_call>',
    "<returncode>0</returncode>\n<output>\nx = 1\n</output> system user assistant tool",
]
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- elif default_system is defined or DEFAULT_SYSTEM %}
{{- '<|im_start|>system\\nYou are a default.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=0) %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message['role'] == 'user' or (message['role'] == 'system' and not loop.first) %}
{{- '<|im_start|>' + message['role'] + '\\n' + USER_CONTENT + '<|im_end|>\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if THINKS and loop.index0 > ns.last_user %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{%- if (loop.first and message['content']) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- ARGUMENTS }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message['role'] == 'tool' %}
{%- if messages[loop.index0 - 1]['role'] != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
STRING_OR_DICT = (
    "(call['function']['arguments'] if call['function']['arguments'] is string "
    "else call['function']['arguments'] | tojson)"
)


def template(
    *,
    thinks: bool = False,
    default_system: bool = False,
    user_content: str = "message['content']",
    arguments: str = STRING_OR_DICT,
) -> str:
    """Return a ChatML template of Qwen's kind, with one habit changed."""
    return (
        CHATML.replace("default_system is defined or DEFAULT_SYSTEM", str(default_system).lower())
        .replace("USER_CONTENT", user_content)
        .replace("THINKS", str(thinks).lower())
        .replace("ARGUMENTS", arguments)
    )


def make_tokenizer(folder: Path, chat_template: str | None, *, vocab: int = 400) -> Path:
    """Train a byte-level BPE, split as Qwen's is, and save it as a model folder's tokenizer."""
    backend = Tokenizer(models.BPE())
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return folder


def make_task(issue: str = "f(2) gives 3, not 4.") -> Task:
    return Task(
        instance_id="t-1",
        repo="r",
        problem_statement=issue,
        patch="",
        fail_to_pass=("a",),
        pass_to_pass=(),
        image_name="t-1",
    )


class ScriptedEngine:
    """Answers with the given texts in turn, as tokens; keeps the prompts that it was sent."""

    def __init__(self, tokens: ChatTokens, replies: Sequence[str | Exception]) -> None:
        self.tokens, self.replies = tokens, list(replies)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.sampled: list[tuple[int, ...]] = []

    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        del trajectory
        self.prompts.append(list(input_ids))
        self.samplings.append(sampling)
        reply = self.replies[min(len(self.prompts), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        ids = [*self.tokens.encode(reply), self.tokens.end_of_turn]
        finish: Finish = "stop"
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], "length"
        self.sampled.append(tuple(ids))
        return Generation(
            token_ids=tuple(ids),
            logprobs=tuple(-0.5 for _ in ids),
            versions=(VersionSpan(version=len(self.prompts), start=0, end=len(ids)),),
            finish=finish,
            cached_tokens=0,
            engine="scripted",
        )


class ScriptedSandbox:
    """Gives each known command's result; others print nothing. Keeps what it was asked."""

    def __init__(self, results: dict[str, ExecResult | Exception] | None = None) -> None:
        self.results = results or {}
        self.asked: list[tuple[str, float, int]] = []

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        max_bytes: int = 10_000,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        del env
        self.asked.append((command, timeout_s, max_bytes))
        result = self.results.get(command, ran())
        if isinstance(result, Exception):
            raise result
        return result

    async def put(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        raise NotImplementedError

    async def stop_processes(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return None


def ran(
    output: str = "", code: int = 0, *, seconds: float = 0.0, timed_out: bool = False
) -> ExecResult:
    return ExecResult(
        output=output,
        exit_code=-1 if timed_out else code,
        timed_out=timed_out,
        truncated=False,
        oom=False,
        seconds=seconds,
    )


def block(command: str) -> str:
    return f"THOUGHT: next.\n\n```mswea_bash_command\n{command}\n```"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
