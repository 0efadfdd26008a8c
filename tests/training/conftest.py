"""One tiny model for all tests of training, and a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabricate import make_config, make_model
from megatron_ranks import make_family

from agentrl.config import RunConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return make_config(tmp_path, tiny_model)


@pytest.fixture
def mixture_config(tmp_path: Path) -> RunConfig:
    """Of a model with experts: who balances them has a back end, on one CPU process as well."""
    return make_config(tmp_path, make_family(tmp_path / "mixture", "qwen3_moe"))


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Any file over 200 kB fails with EFBIG while the fixture is in force, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
