"""YAML files and `key=value` overrides as layers of one mapping, before any schema is laid on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.errors import ConfigError


def read(path: Path, chain: tuple[Path, ...] = ()) -> DictConfig:
    """Read a file laid over what it extends. Raises ConfigError; `chain` is who extends it."""
    if path.resolve() in chain:
        raise ConfigError(f"{path}: extends itself by way of {chain[-1]}; break the circle")
    if not path.is_file():
        raise ConfigError(
            f"config {path}: no such file (from {Path.cwd()}); give the path of a YAML"
        )
    try:
        own = OmegaConf.load(path)
    except Exception as error:  # yaml and omegaconf each have several kinds
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(own, DictConfig):
        raise ConfigError(f"{path}: holds no mapping; a config is `key: value` lines")
    parents = own.pop("extends", None) or []
    layers = [
        read(path.parent / name, (*chain, path.resolve()))
        for name in ([parents] if isinstance(parents, str) else parents)
    ]
    return cast(DictConfig, OmegaConf.merge(*layers, own))


def dotlist(overrides: Iterable[str]) -> DictConfig:
    """Return overrides as a mapping. Raises ConfigError where one has no `=`."""
    bad = [item for item in overrides if "=" not in item or item.startswith("-")]
    if bad:
        raise ConfigError(f"override {bad[0]!r}: must read key=value, as in training.steps=10")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (YAMLError, OmegaConfBaseException) as error:
        what = str(error).splitlines()[0]
        raise ConfigError(
            f"overrides {' '.join(overrides)}: not readable as YAML: {what}"
        ) from error


def refuse_unknown(tree: Any, known: Sequence[str], where: str) -> None:
    """Raise ConfigError on a key that is not in `known`; the message names its neighbours."""
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for key in _leaves(tree):
        if key in known:
            continue
        if key in sections:
            raise ConfigError(
                f"{where}: {key} is a section; give its keys, as in {key}.NAME: value"
            )
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5) or [
            name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]
        ]
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _leaves(tree: Any, prefix: str = "") -> Iterable[str]:
    if not isinstance(tree, dict) or not tree:
        return [prefix.rstrip(".")] if prefix else []
    return [key for name, value in tree.items() for key in _leaves(value, f"{prefix}{name}.")]
