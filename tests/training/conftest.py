"""One tiny model for all tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from fabricate import make_config, make_model

from agentrl.config import RunConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return make_config(tmp_path, tiny_model)
