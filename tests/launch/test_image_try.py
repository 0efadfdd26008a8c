"""What `image check` does with engines and trainers: it has them work, on a tiny model."""

from __future__ import annotations

import importlib.util

import pytest

from launch import image_try


@pytest.mark.slow
def test_every_engine_and_trainer_here_works_or_is_left_out_with_the_reason() -> None:
    found = {item.name: item for item in image_try.findings()}
    assert list(found) == ["embedded token", "sglang token", "torch step", "megatron step"]
    assert found["embedded token"].state == found["torch step"].state == "ok"
    assert "log-probability -" in found["embedded token"].found
    if importlib.util.find_spec("sglang") is None:
        assert found["sglang token"].found == "no sglang in here"
