"""The compute thread of the embedded engine: it outlives whoever asks it for something."""

from __future__ import annotations

from pathlib import Path

from agentrl.engine.batch import Batch
from agentrl.engine.loaded import LoadedModel
from agentrl.engine.scheduler import Scheduler


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
