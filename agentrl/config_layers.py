"""YAML files and `key=value` overrides as layers of one mapping, before any schema is laid on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.config_cluster import CLUSTERS, preset
from agentrl.config_engine import ENGINES
from agentrl.errors import ConfigError

PRESETS = {"cluster": CLUSTERS, "engine": ENGINES}
"""Sections that may be named, as in `cluster=lab`, and where what they then hold lies."""


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
    below = OmegaConf.merge(*layers) if layers else OmegaConf.create()
    for section in PRESETS:
        if isinstance(name := own.get(section), str):
            del own[section]
            below = with_preset(
                cast(DictConfig, below), section, name, f"{path}", beside=path.parent
            )
    return cast(DictConfig, OmegaConf.merge(below, own))


def laid_over(below: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Lay `key=value` overrides over a mapping; `cluster=NAME`, `engine=NAME` go before others."""
    rest = list(overrides)
    for section in PRESETS:
        named = [item.partition("=")[2] for item in rest if item.startswith(f"{section}=")]
        if named:
            below = with_preset(below, section, named[-1], "command line")
        rest = [item for item in rest if not item.startswith(f"{section}=")]
    return cast(DictConfig, OmegaConf.merge(below, dotlist(rest)))


def with_preset(
    below: DictConfig, section: str, name: str, where: str, *, beside: Path | None = None
) -> DictConfig:
    """Lay a preset over what is below; a cluster takes the place of the one chosen before."""
    if section == "cluster":
        below.pop("cluster", None)
    path = preset(name, where, section=section, folder=PRESETS[section], beside=beside)
    return cast(DictConfig, OmegaConf.merge(below, read(path)))


def dotlist(overrides: Iterable[str]) -> DictConfig:
    """Return overrides as a mapping. Raises ConfigError where one has no `=`."""
    bad = [item for item in overrides if "=" not in item or item.startswith("-")]
    if bad:
        raise ConfigError(f"override {bad[0]!r}: must read key=value, as in training.steps=10")
    try:
        # an empty value is an empty text, which clears a key; OmegaConf takes it for null
        return OmegaConf.from_dotlist([f"{i}''" if i.endswith("=") else i for i in overrides])
    except (YAMLError, OmegaConfBaseException) as error:
        what = str(error).splitlines()[0]
        raise ConfigError(
            f"overrides {' '.join(overrides)}: not readable as YAML: {what}"
        ) from error


def refuse_unknown(
    tree: Any, known: Sequence[str], where: str, *, free: Sequence[str] = ()
) -> None:
    """Raise ConfigError on a key that is not in `known`; the message names its neighbours.

    free: keys whose own keys anybody may name.
    """
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for key in _leaves(tree):
        if key in known or any(key.startswith(f"{name}.") for name in free):
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
