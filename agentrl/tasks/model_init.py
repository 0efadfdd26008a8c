"""A random Qwen3-shaped model, and the byte-level BPE tokenizer of the repair tasks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.config import ModelConfig
from agentrl.tasks.command import CLOSE, OPEN
from agentrl.tasks.mutate import PATTERNS

END, PAD = "<|im_end|>", "<|pad|>"
ROLES = tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool"))
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML without line breaks between turns: a message costs two tokens, and only ever appends."""
_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
_BOILERPLATE = (
    f"```mswea_bash_command\n{OPEN}",
    f"|{CLOSE}\n```",
    f"{_CALL}{OPEN}",
    f'|{CLOSE}"}}}}\n</tool_call>',
    *(f"{line}s|" for line in range(1, 20)),
    "|",
    *(f"{pattern}|" for pattern in PATTERNS.values()),
    *(json.dumps(f"{pattern}|")[1:-1] for pattern in PATTERNS.values() if "\\" in pattern),
    "Fix f.py.",
    "\nassert ",
    " # got ",
    ", got ",
    *(f"\n{line} {indent}" for line in range(2, 10) for indent in ("    ", "        ")),
    *(f"\n{line}             " for line in range(4, 7)),
)
_PYTHON = (
    *("1 def ", "return ", "if ", " for ", "while ", "not ", " else ", "else:", ".append("),
    *(" < ", " <= ", " > ", " >= ", " == ", " != ", " in ", " not in ", " and ", " or "),
    *(" + ", " - ", " * ", " // ", " % ", " = ", " += ", " -= "),
    *(
        ", ",
        "(",
        ")",
        "[",
        "]",
        "([",
        "):",
        "])",
        ":",
        "len(",
        "sum(",
        "abs(",
        "sorted(",
        "range(",
        "min(",
        "max(",
    ),
    *('"', '", "', '["', '"]', '("', '")', "for "),
)
_WORDS = ("True", "False", "None")
_PIECES = r"\d{1,2}|[bcdfghjklmnpqrstvwxyz][aeiou]|\s+|[^\s\d]"


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on `texts`: syllables and numbers become tokens; fixed phrases are added whole."""
    added = [*_BOILERPLATE, *_PYTHON]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, *ROLES])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.add_tokens([AddedToken(text, normalized=False, single_word=True) for text in _WORDS])
    taken = len(added) + len(_WORDS) + len(ROLES) + 2
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - taken,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fixed = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    tokenizer.train_from_iterator((fixed.sub(" ", text) for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen3ForCausalLM:
    """Return a random model with tied embeddings, the same one for the same seed."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=max(1, config.heads // 2),
        head_dim=config.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(shape)


def save_model(
    folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: object
) -> None:
    """Write Hugging Face's layout, with `settings` beside it, in one rename."""
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "made_by_init.json").write_text(json.dumps(settings, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
