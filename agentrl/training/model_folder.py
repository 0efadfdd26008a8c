"""Hugging Face model folders: reading one for training, and writing one whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.errors import ConfigError, PublishError
from agentrl.handoff.publish import fsync_folder
from agentrl.hf_load import load_weights
from agentrl.hf_shape import read_config, read_shape, why_unmapped
from agentrl.training.weight_files import WEIGHTS_FILE, WeightFiles, check_finite, check_weights

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".index.json")


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, *, attention: str = "sdpa"
) -> nn.Module:
    """Return the causal language model in `folder`.

    Raises ConfigError when none is there, and for weights that are not what config.json asks for,
    or no numbers: transformers would fill a missing tensor with random ones, and only warn.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {folder}: no config.json there; give a Hugging Face model folder, "
            "or set model.init=qwen3 and let `prepare` make one"
        )
    config, files = read_config(folder), WeightFiles(folder)
    if not why_unmapped(config):
        check_weights(files, read_shape(config))
    from transformers import AutoModelForCausalLM  # seconds of import: only who trains pays
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, found = load_weights(
        AutoModelForCausalLM,
        folder,
        dtype=dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _check_loaded(folder, found)
    check_finite(model.named_parameters(), folder)
    return cast(nn.Module, model)


def _check_loaded(folder: Path, found: Mapping[str, Any]) -> None:
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{folder}: no tensor {', '.join(missing[:3])}, which config.json asks for"
        )
    if left := sorted(found["unexpected_keys"]):
        raise ConfigError(
            f"{folder}: {', '.join(left[:3])} has no place in the model that config.json tells of"
        )
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise ConfigError(
            f"{name} is {list(stored)} in the weights of {folder} and {list(wanted)} by "
            "config.json: the two are not of one model"
        )


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights under their Hugging Face names, a tied one once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def copy_side_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer and chat template: every plain file that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_ENDINGS) and path.name[0] != ".":
            shutil.copyfile(path, target / path.name)


def write_model_folder(out: Path, weights: Iterable[tuple[str, Tensor]], source: Path) -> None:
    """Put a loadable model at `out`, replacing what was there; side files come from `source`.

    Each tensor goes to the CPU as it comes: a GPU has no room for the whole of a cut model.
    Raises PublishError when the disk refuses; what was at `out` stays then.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    try:
        _write_folder(temporary, named, source)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise PublishError(
            f"writing {out}: {error}; what was there stays. Free space there, then do it again"
        ) from error
    if out.exists():
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out, old)
        os.rename(temporary, out)
        shutil.rmtree(old)
    else:
        os.rename(temporary, out)
    fsync_folder(out.parent)


def _write_folder(temporary: Path, named: Mapping[str, Tensor], source: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    copy_side_files(source, temporary)
    save_file(dict(named), temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(temporary)
