"""Tasks of every form over real repositories, their images lent a pytest."""

from __future__ import annotations

import shutil

import pytest
from task_forms import Forms


@pytest.fixture(scope="session")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is missing: apt-get install bubblewrap")
    return Forms(tmp_path_factory.mktemp("forms"))
