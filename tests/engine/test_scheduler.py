"""The compute thread of the embedded engine: it outlives whoever asks it for something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agentrl.engine.batch import Batch
from agentrl.engine.loaded import LoadedModel
from agentrl.engine.scheduler import Scheduler
from agentrl.errors import ConfigError


def test_callers_that_left_before_their_turn_are_passed_over(
    model: Path, other_model: Path
) -> None:
    loaded = LoadedModel(model, version="0", context=256)
    batch = Batch(model=loaded, max_running=2, kept=2, context=256, prefill_tokens=256)
    scheduler = Scheduler(batch)
    assert scheduler.ping().cancel()
    assert scheduler.update(other_model, "7", is_flushing=True).cancel()
    scheduler.start()
    assert scheduler.flush().result(timeout=60)
    assert batch.model.version == "0", "nobody waits for those weights any more"
    assert scheduler.update(other_model, "8", is_flushing=True).result(timeout=60)[0]
    scheduler.stop()


def test_code_and_pickles_in_a_model_folder_are_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    told = json.loads((model / "config.json").read_bytes())
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(told | own))
    (folder / "mine.py").write_text(f"open({str(folder / 'was run')!r}, 'w')")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        LoadedModel(folder, version="0", context=256)
    assert not (folder / "was run").exists()
    (folder / "config.json").write_text(json.dumps(told))
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        LoadedModel(folder, version="0", context=256)
