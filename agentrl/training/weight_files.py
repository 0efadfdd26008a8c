"""The weights of a model folder: which of its files they are, one tensor at a time, all or none.

As transformers does it: model.safetensors, else what its index names, else every *.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.hf_shape import Layout, ModelShape
from agentrl.training.hf_map import check_shape
from agentrl.training.hf_tables import places, shapes_of

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPUTED = "inv_freq"
"""End of the names of what old files hold and every model computes by itself."""


class WeightFiles:
    """The tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for no, unreadable or outside files, and for a tensor in two."""
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path in _files_of(folder):
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: not a safetensors file ({error})") from error
            for name in self._open[path].keys():  # noqa: SIM118  # not a mapping
                if name in self._files:
                    raise ConfigError(
                        f"{folder}: {name} is in {self._files[name].name} and in {path.name}; "
                        "remove the file that is not of this model"
                    )
                self._files[name] = path
        if not self._files:
            raise ConfigError(f"{folder}: no *.safetensors there; give a folder with weights")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ConfigError without one of that very name."""
        if name not in self._files:
            raise ConfigError(f"{self.folder}: no tensor {name}, which config.json asks for")
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(prod(self.shape(name)) for name in self)

    def get(self, name: str) -> Tensor:
        """Return one tensor. A fused expert tensor answers for each of its experts' names."""
        fused = fused_name(name)
        if name in self._files or fused not in self._files:
            self.shape(name)
            tensor: Tensor = self._open[self._files[name]].get_tensor(name)
            return tensor
        expert, part = name.split(".")[-3:-1]
        whole = torch.as_tensor(self._open[self._files[fused]].get_slice(fused)[int(expert)])
        return whole if part == "down_proj" else whole.chunk(2)[part == "up_proj"]


def fused_name(name: str) -> str:
    """Return the tensor in which transformers 5 holds an expert's; '' for what is no expert's."""
    stem, _, rest = name.partition(".mlp.experts.")
    kind = "down_proj" if "down_proj" in rest else "gate_up_proj"
    return f"{stem}.mlp.experts.{kind}" if rest else ""


def check_weights(files: WeightFiles, shape: ModelShape) -> None:
    """Raise ConfigError unless the files hold just what the config asks for; names and shapes.

    Ends at the first thing that is missing, however many the config asks for.
    """
    left = {name for name in files if not name.endswith(COMPUTED)}
    for place in places(shape, Layout()):
        for name, wanted in zip(place.hf, shapes_of(place, shape), strict=True):
            fused = fused_name(name)
            if name in files or fused not in files:
                check_shape(name, files.shape(name), wanted)
                left.discard(name)
            elif fused in left:
                check_shape(fused, files.shape(fused), _fused_shape(fused, shape))
                left.discard(fused)
    if shape.is_tied and HEAD in left:
        _check_tied(files)
        left.discard(HEAD)
    if left:
        told = ", ".join(sorted(left)[:3])
        raise ConfigError(
            f"{files.folder}: {told} has no place in {shape.family} of {shape.layers} layers, "
            f"which is what config.json says it is ({len(left)} tensors are left over)"
        )


def check_finite(named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Raise ConfigError for weights that are no numbers: no step could mend them."""
    for name, tensor in named:
        if not torch.isfinite(tensor.detach().sum(dtype=torch.float32)):
            raise ConfigError(
                f"{name} of the weights in {folder} holds NaN or infinity; take another copy of "
                "the model, or an older checkpoint"
            )


def _fused_shape(name: str, shape: ModelShape) -> tuple[int, int, int]:
    if name.endswith("down_proj"):
        return shape.experts, shape.hidden, shape.inner
    return shape.experts, 2 * shape.inner, shape.hidden


def _check_tied(files: WeightFiles) -> None:
    """A head of its own beside tie_word_embeddings would be trained by one reader, and not read
    by another."""
    if not torch.equal(files.get(HEAD), files.get(EMBEDDING)):
        raise ConfigError(
            f"{files.folder}: config.json says tie_word_embeddings=true, and {HEAD} is not equal "
            f"to {EMBEDDING}; set it false there, or remove the tensor that is wrong"
        )


def _files_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file() or not (folder / INDEX).is_file():
        whole = folder / WEIGHTS_FILE
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder / INDEX}: not an index of tensors ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{folder / INDEX}: names {name!r}; weights lie in the folder of their index"
            )
        if not name.endswith(".safetensors") or not (folder / name).is_file():
            raise ConfigError(f"{folder / INDEX}: names {name}, which is no safetensors file there")
    return [folder / name for name in names]
