"""Programs of Slurm that a test writes itself, first on PATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
