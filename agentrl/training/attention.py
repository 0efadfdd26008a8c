"""Causal attention over rows that hold several sequences one after another, without a mask.

Registered with transformers as `agentrl_packed`, and called by Megatron's layers. On a GPU in
bfloat16 or float16 torch's varlen kernel (flash attention by the sequences' ends) does it; else
each sequence has its own scaled_dot_product_attention, which the flash kernel serves too. No [T, T]
mask anywhere: at 64k tokens one of booleans alone would be 4 GiB. Rows with one sequence each,
padded on the right, need no ends: a causal row never looks to the right.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.training.windows import attend_windows, takes_windows

NAME = "agentrl_packed"


def register() -> str:
    """Make the attention known to transformers; return the name to ask it by."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Return [rows, T, heads, dim] of [rows, heads, T, dim]; transformers' attention interface.

    cu_seq_lens_q: [sequences + 1] int32, 0 first, the ends of the one row's sequences.
    Raises ConfigError for a model with a sliding window.
    """
    del module, attention_mask, ignored
    if sliding_window is not None:
        raise ConfigError(
            f"the model has a sliding window of {sliding_window}: training.packing=packed "
            "attends to whole sequences only; use padded"
        )
    if cu_seq_lens_q is None:
        return _attend(query, key, value, scaling).transpose(1, 2), None
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    out = attend_packed(query, key, value, cu_seq_lens_q, max_length_q, scale=scaling)
    return out[None], None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    lengths: Sequence[int] = (),
) -> Tensor:
    """Return [T, heads, dim] of [T, heads, dim] and, for key and value, as many heads or fewer.

    ends: [sequences + 1] int32, 0 first; longest: of the sequences; lengths: theirs, where the
    caller has them on the CPU.
    """
    if lengths and takes_windows(query, lengths):
        return attend_windows(query, key, value, lengths, scale)
    if _takes_varlen(query):
        return _varlen(query, key, value, ends, longest, scale)
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    parts = [
        _attend(query[:, :, first:last], key[:, :, first:last], value[:, :, first:last], scale)
        for first, last in pairwise(ends.tolist())
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _takes_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and HAS_VARLEN


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in _VARLEN_TAKES:
        options["enable_gqa"] = True
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    if "window_size" in _VARLEN_TAKES:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    return cast(Tensor, varlen_attn(query, key, value, ends, ends, longest, longest, **options))


def _varlen_arguments() -> frozenset[str]:
    """Return what this torch's varlen_attn takes: `window_size` came after `is_causal`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_VARLEN_TAKES = _varlen_arguments()
HAS_VARLEN = "scale" in _VARLEN_TAKES
