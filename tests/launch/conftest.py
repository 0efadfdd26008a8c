from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a program first on PATH, which notes its arguments in NAME.log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        log = folder / f"{name}.log"
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >>"{log}"\n{body}\n')
        (folder / name).chmod(0o755)
        return log

    return make
