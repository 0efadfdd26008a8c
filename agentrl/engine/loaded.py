"""The model that an embedded engine computes with, and the exchange of its weights in place."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.engine.fused import TOLERANCE, FusedForward
from agentrl.engine.kv_cache import RowCache
from agentrl.errors import RecordError
from agentrl.hf_load import load_safely, load_weights

log = logging.getLogger(__name__)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RowCache], torch.Tensor]


class LoadedModel:
    """A causal language model of transformers in float32, with the label of its weights.

    Every layer must attend to the whole context; the tensors of the checkpoint must have the
    module's own names. Raises RecordError where either does not hold, ConfigError for a folder
    that transformers cannot load.
    """

    def __init__(self, folder: Path, *, version: str, context: int) -> None:
        config = load_safely(AutoConfig, folder)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise RecordError(
                f"model {folder}: layers of kind {', '.join(sorted(kinds))}; the embedded engine "
                "takes full attention only: use engine.kind=sglang"
            )
        self.model = load_weights(
            AutoModelForCausalLM, folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.folder = folder
        self.version = version
        self.vocabulary = int(config.vocab_size)
        self.stop_ids = _stop_ids(folder, config)
        self._fused: FusedForward | None = None
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in 5.2x
        self._tensors: dict[str, torch.Tensor] = self.model.state_dict()
        self._stored: dict[str, torch.dtype] = {}
        self._passes = 0
        self.load(folder, version=version)
        with torch.inference_mode():
            self._fused = self._try_to_fuse(context)

    def load(self, folder: Path, *, version: str) -> None:
        """Overwrite the weights from `folder`; nothing changes unless all of it was read.

        Raises RecordError or OSError.
        """
        self.take(dict(read_tensors(folder)), version=version, where=str(folder))
        self.folder = folder

    def take(self, fresh: dict[str, torch.Tensor], *, version: str, where: str) -> None:
        """Overwrite the weights with tensors under the files' names; all of them or none.

        Raises RecordError, saying `where` they came from.
        """
        self._refuse_misfit(where, fresh)
        with torch.inference_mode():
            for name, tensor in fresh.items():
                self._tensors[name].copy_(tensor)
            if self._fused is not None:
                self._fused.reload()
        self._stored = {name: tensor.dtype for name, tensor in fresh.items()}
        self.version = version

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return what memory holds, under the names and in the types of the files it came from."""
        return {name: self._tensors[name].to(kind) for name, kind in self._stored.items()}

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        """Return the logits after the last column. [rows, vocabulary]"""
        run = self._fused or self._plain
        self._passes += 1
        return run(ids, positions, mask, cache)

    @property
    def layers_done(self) -> int:
        """A count that moves while the model computes: layers, or passes of the plain forward."""
        return self._passes if self._fused is None else self._fused.layers_done

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def _plain(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        """The same by transformers' own forward."""
        arguments: dict[str, Any] = {self._cache_name: cache}
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **arguments,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _try_to_fuse(self, context: int) -> FusedForward | None:
        """Return the short forward if it gives, here and now, what the plain one gives."""
        expected = self._probe(self._plain)
        try:
            fused = FusedForward(self.model, context=context)
        except AttributeError as error:
            log.info("transformers' own forward is used: %s", error)
            return None
        self._tensors = self.model.state_dict()  # fusing moved them
        fused.reload()
        gap = float((self._probe(fused) - expected).abs().max())
        if not gap < TOLERANCE:
            log.info("transformers' own forward is used: the short one is %.1e away", gap)
            return None
        return fused

    def _probe(self, run: Forward) -> torch.Tensor:
        """Return the log-probabilities of a prefill and of a step after it, for two rows."""
        width, cache = 7, RowCache(rows=2, context=16)
        ids = torch.arange(2 * width + 2).view(2, -1) * 37 % self.vocabulary
        outs = []
        for at in (torch.arange(width).repeat(2, 1), torch.full((2, 1), width)):
            mask = torch.zeros(2, 1, at.shape[1], 16)
            mask.masked_fill_(torch.arange(16) > at[:, None, :, None], -torch.inf)
            cache.aim(0, at, 16)
            outs.append(torch.log_softmax(run(ids.gather(1, at), at, mask, cache), dim=-1))
        return torch.cat(outs)

    def _refuse_misfit(self, where: str, fresh: dict[str, torch.Tensor]) -> None:
        for name, tensor in fresh.items():
            mine = self._tensors.get(name)
            if mine is None or mine.shape != tensor.shape:
                held = "no such tensor" if mine is None else f"shape {tuple(mine.shape)}"
                raise RecordError(
                    f"weights {where}: {name} of shape {tuple(tensor.shape)}, but the model has "
                    f"{held}; give weights of the same architecture"
                )
        if missing := sorted(set(self._stored) - set(fresh)):
            raise RecordError(
                f"weights {where}: {len(missing)} tensors are missing, the first {missing[0]}"
            )


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the safetensors files in `folder`. Raises RecordError, OSError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RecordError(f"weights {folder}: no *.safetensors there; give a model's folder")
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)
        except Exception as error:  # safetensors' own class is not exported
            raise RecordError(f"weights {path}: not readable: {error}") from error


def _stop_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the model's own end tokens: config.json's, and generation_config.json's."""
    found = [getattr(config, "eos_token_id", None)]
    path = folder / "generation_config.json"
    if path.is_file():
        found.append(json.loads(path.read_text()).get("eos_token_id"))
    flat = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return frozenset(int(item) for item in flat if item is not None)
