"""A short forward for the common decoder: same weights, a fraction of the Python.

On small models transformers' own forward spends most of a decode step between kernels. This one
covers pre-norm decoders with rotary positions and a gated MLP (Llama, Qwen2, Qwen3, Mistral, …).
It is taken only when a probe shows, on this very model, that both give the same logits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from agentrl.engine.kv_cache import RowCache

log = logging.getLogger(__name__)
TOLERANCE = 1e-4
"""Largest difference of log-probabilities at which the two count as equal."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; those used together lie together."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim], copied at each load."""
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedForward:
    """The forward over `whole`'s weights, whose parameters become views of the fused ones.

    Raises AttributeError when `whole` is built otherwise; what was built must be probed before use.
    """

    def __init__(self, whole: Any, *, context: int) -> None:
        inner = whole.model
        attention = inner.layers[0].self_attn
        self._inner, self._whole = inner, whole
        self._eps = float(inner.norm.variance_epsilon)
        self._act = inner.layers[0].mlp.act_fn
        self._scale = float(attention.scaling)
        self._head_dim = int(attention.head_dim)
        self._heads = attention.q_proj.weight.shape[0] // self._head_dim
        self._kv_heads = attention.k_proj.weight.shape[0] // self._head_dim
        positions = torch.arange(context + 1)[None]
        cos, sin = inner.rotary_emb(torch.zeros(1, 1, 1), positions)
        half = self._head_dim // 2
        self._cos = cos[0, :, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]
        self._layers = [self._fuse(layer) for layer in inner.layers]
        self.layers_done = 0
        """Since the start: moves within a long prefill too."""

    def reload(self) -> None:
        """Take over what the fused weights hold by value. Call after each exchange of weights."""
        for mine, layer in zip(self._layers, self._inner.layers, strict=True):
            if mine.qk_norm is not None:
                attention = layer.self_attn
                mine.qk_norm[: self._heads] = attention.q_norm.weight
                mine.qk_norm[self._heads :] = attention.k_norm.weight

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        """Return the logits after the last column. ids, positions: [n, T]; mask: [n, 1, T, L]."""
        n, width = ids.shape
        hidden = self._inner.embed_tokens(ids).view(n * width, -1)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden) * layer.norm_in
            attended = self._attend(layer, index, normed.view(n, width, -1), cos, sin, mask, cache)
            hidden = torch.addmm(hidden, attended, layer.out.t())
            normed = self._norm(hidden) * layer.norm_mlp
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, self._act(gate) * up, layer.down.t())
            self.layers_done += 1
        last = hidden.view(n, width, -1)[:, -1]
        logits: torch.Tensor = self._whole.lm_head(self._norm(last) * self._inner.norm.weight)
        return logits

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last axis, weight left out; quicker on a CPU than torch's own."""
        return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + self._eps)

    def _attend(
        self,
        layer: _Layer,
        index: int,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        cache: RowCache,
    ) -> torch.Tensor:
        """Return [n · T, heads · head_dim]; `normed` is [n, T, hidden]."""
        n, width = normed.shape[:2]
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        every = functional.linear(normed, layer.qkv, layer.qkv_bias).view(n, width, -1, dim)
        turned = every[:, :, : heads + kv_heads]
        if layer.qk_norm is not None:
            turned = self._norm(turned) * layer.qk_norm
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((high, low), dim=-1) * sin
        fresh = torch.cat((turned[:, :, heads:], every[:, :, heads + kv_heads :]), dim=2)
        keys, values = cache.write(fresh.view(-1, dim), 2 * kv_heads, index)
        query = turned[:, :, :heads]
        if width == 1:  # one column: the heads that share keys become its rows
            packed = query.reshape(n, kv_heads, heads // kv_heads, dim)
            out = functional.scaled_dot_product_attention(
                packed, keys, values, attn_mask=mask, scale=self._scale
            )
            return out.reshape(n, heads * dim)
        out = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2).reshape(n * width, heads * dim)

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [one.bias for one in projections]
        has_norm = hasattr(attention, "q_norm")
        norm = torch.empty(self._heads + self._kv_heads, self._head_dim) if has_norm else None
        return _Layer(
            norm_in=layer.input_layernorm.weight,
            qkv=_join(projections, "weight"),
            qkv_bias=None if biases[0] is None else _join(projections, "bias"),
            qk_norm=norm,
            out=attention.o_proj.weight,
            norm_mlp=layer.post_attention_layernorm.weight,
            gate_up=_join((mlp.gate_proj, mlp.up_proj), "weight"),
            down=mlp.down_proj.weight,
        )


def _join(modules: tuple[Any, ...], name: str) -> torch.Tensor:
    """Return one tensor of all, and make each module's own a view of it."""
    parts = [getattr(module, name) for module in modules]
    joined = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = joined[start : start + len(part)]
        start += len(part)
    return joined
