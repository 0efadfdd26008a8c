"""Shared by all tests: one torch thread, folders with awkward names, programs first on PATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("patient", deadline=None)  # a busy machine proves nothing wrong
settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Keep the tests of a file in one process: what they share is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture
def odd_path(tmp_path: Path) -> Path:
    """A folder whose name has a space and a quote."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    return folder


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a program of a name and a shell body; returns the file of its words, a line each."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        calls = folder / f"{name}.calls"
        program = folder / name
        program.write_text(
            f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\" >>'{calls}'\n{body}\n", encoding="utf-8"
        )
        program.chmod(0o755)
        return calls

    return make
