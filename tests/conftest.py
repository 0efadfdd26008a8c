"""Shared by all tests: one torch thread, and folders with awkward names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def odd_path(tmp_path: Path) -> Path:
    """A folder whose name has a space and a quote."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    return folder
