"""`make sglang` on a machine that it does not fit, and what it changes in packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from configs.sglang_cpu_stand_ins import FILES, change

ROOT = Path(__file__).parents[2]


def test_a_python_other_than_the_pinned_one_is_refused(odd_path: Path) -> None:
    python = odd_path / "python3"
    python.write_text("#!/bin/sh\necho 3.13\n")
    python.chmod(0o755)
    script = ROOT / "configs" / "install_sglang_cpu.sh"
    done = subprocess.run(
        ["sh", script, python, odd_path / "venv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is Python 3.13; its packages are pinned for 3.11" in done.stderr
    assert not (odd_path / "venv").exists()


def test_a_package_is_changed_once_and_another_version_of_it_is_not(tmp_path: Path) -> None:
    package = tmp_path / "package.py"
    package.write_text("a\nb\n")
    for _ in range(2):
        change(package, "b\n", "# b\n")
    assert package.read_text() == "a\n# b\n"
    package.write_text("c\n")
    with pytest.raises(SystemExit, match="0 times, not once"):
        change(package, "b\n", "# b\n")


def test_a_stand_in_says_what_was_called_of_it() -> None:
    found: dict[str, object] = {}
    exec(FILES["sgl_kernel/__init__.py"], found)
    op = found["__getattr__"]("silu_and_mul")  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match="silu_and_mul was called"):
        op()
