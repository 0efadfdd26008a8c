"""Gaps of real steps on their way to the node whose engine is far off."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
from fabricate import make_group, make_trajectory

from agentrl.engine import quarantine
from agentrl.engine.drift import FEWEST_DRAWS
from agentrl.events import NoEvents
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group
from agentrl.training.engine_gaps import EngineGaps, Origin, gaps_by_age, origin_of
from agentrl.training.intake import make_batch
from agentrl.training.loop import train
from agentrl.training.packing import pack
from agentrl.training.torch_backend import TorchBackend

NEAR, FAR = "http://127.0.0.1:1", "http://127.0.0.1:2"


def record(*engines):
    replies = [{"role": "assistant", "extra": {"response": {"engine": one}}} for one in engines]
    return json.dumps({"messages": [{"role": "user", "content": "x"}, *replies]})


def sampled_by(engine, draw, attempt):
    item = make_trajectory(draw, attempt, reward=attempt // 2 % 2)
    off = -20.0 if engine == FAR else 0.0
    return dataclasses.replace(item, logprobs=item.logprobs + off, messages=record(engine))


def test_the_engine_that_is_far_off_is_named_to_its_node(tiny_config):
    tiny_config.training.steps = 1
    engines = [FAR if attempt % 2 else NEAR for attempt in range(4)]
    tiny_config.training.groups_per_step = FEWEST_DRAWS
    for draw in range(FEWEST_DRAWS):
        items = tuple(sampled_by(engine, draw, at) for at, engine in enumerate(engines))
        group = Group(draw=draw, task_id=f"task-{draw}", trajectories=items)
        SpoolWriter(tiny_config.run_dir / "spool", 0).write(group)
    train(tiny_config, attempt=3, stop=lambda: False, events=NoEvents())
    [(engine, why)] = quarantine.asked(tiny_config.run_dir / "attempts" / "0003", 0).items()
    assert engine == FAR
    assert "nats a token from the trainer's" in why


def test_a_step_tells_the_gap_of_each_sample(tiny_config, tiny_model):
    batch = make_batch([make_group(0, [1, 0, 0])], 0, tiny_config, Counter())
    backend = TorchBackend(tiny_model, tiny_config)
    rows = [pack([sample], 128)[0] for sample in batch.samples]
    apart = [float((backend.logprobs(row) - row.engine_logprobs).abs().mean()) for row in rows]
    backend.train_step(pack(batch.samples, 40))
    assert backend.gaps == pytest.approx(apart, abs=1e-5)


def test_gaps_are_told_by_the_versions_between_engine_and_trainer():
    origins = [Origin(node=0, engine=NEAR, age=age, draw=0) for age in (2, 0, 2)]
    assert gaps_by_age(origins, [0.5, 0.125, 0.25]) == {"gap_age_0": 0.125, "gap_age_2": 0.375}


def taken(gaps, *, age=0):
    """What one engine's sequences, each of a draw of its own, leave behind."""
    found = EngineGaps(max_drift=8)
    numbers = range(len(gaps))
    found.take([Origin(node=1, engine=NEAR, age=age, draw=draw) for draw in numbers], gaps)
    return found


def test_a_lone_engine_is_judged_by_fresh_sequences_only():
    moved_on = [0.01] * 20 + [0.3] * 16
    assert list(taken(moved_on).judge()) == [1]
    assert taken(moved_on, age=1).judge() == {}


def test_an_engine_once_named_is_judged_anew():
    gaps = taken([0.01] * 20 + [0.3] * 16)
    assert list(gaps.judge()[1]) == [NEAR]
    assert gaps.judge() == {}


def test_sequences_of_several_engines_or_of_another_record_count_for_none():
    item = make_trajectory(0, 0, reward=1.0)
    for messages in (record(NEAR, FAR), "{}", '{"messages": 3}'):
        assert origin_of(dataclasses.replace(item, messages=messages), 2).engine == ""
    once = dataclasses.replace(item, messages=record(NEAR, NEAR))
    assert origin_of(once, 2) == Origin(node=0, engine=NEAR, age=2, draw=0)
