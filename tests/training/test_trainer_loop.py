from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fabricate import VOCABULARY, fill_spool, make_group
from safetensors.torch import load_file

from agentrl import events as ev
from agentrl.errors import DivergedError, NoSignalError, WaitTimeout
from agentrl.handoff.spool import SpoolWriter, list_spool
from agentrl.training.checkpoint import read_consumed
from agentrl.training.intake import Intake
from agentrl.training.loop import train
from agentrl.training.torch_backend import TorchBackend
from agentrl.weights.quiet import is_quiet
from agentrl.weights.version import latest


def go(config, *, attempt=1, stop=lambda: False, events=None):
    return train(config, attempt=attempt, stop=stop, events=events or ev.NoEvents())


def put(config, *groups):
    writer = SpoolWriter(config.run_dir / "spool", 0)
    return [writer.write(group) for group in groups]


def consumed(config):
    return read_consumed(config.run_dir / "checkpoints")


def final_weights(config):
    return load_file(latest(config.run_dir / "weights").folder / "model.safetensors")


def stop_after(config, step):
    """A stop that says yes once the trainer has announced `step`."""

    def stop() -> bool:
        announced = latest(config.run_dir / "weights")
        return announced is not None and announced.step >= step

    return stop


def steps_of(writer):
    return [event for event in ev.read(writer.path) if isinstance(event, ev.Step)]


@pytest.fixture
def events(tmp_path):
    writer = ev.EventWriter(tmp_path / "events", "trainer")
    yield writer
    writer.close()


def test_a_run_takes_its_steps_and_announces_the_last_as_done(tiny_config, events):
    fill_spool(tiny_config, range(7))
    assert go(tiny_config, events=events) == 0
    announced = latest(tiny_config.run_dir / "weights")
    assert (announced.version, announced.step, announced.done) == (3, 3, True)
    assert announced.consumed == [[0, 5]]
    assert consumed(tiny_config) == dict.fromkeys(range(6), "trained")
    assert list(list_spool(tiny_config.run_dir / "spool")) == [6]
    assert [event.step for event in steps_of(events)] == [1, 2, 3]


PAGE = Path(__file__).parents[2] / "docs" / "training.md"
AT_TIMES = "filtered_* quarantined mfu kl_coef rerouted router_balance_coef router_balance"
AT_TIMES += " busiest_expert kl"


def test_step_events_hold_just_the_metrics_that_the_page_tells_and_the_times(tiny_config, events):
    fill_spool(tiny_config, range(6), rewards=(1, 0, None, 1))
    go(tiny_config, events=events)
    _, step, later = steps_of(events)
    _, _, told = PAGE.read_text().partition("A step's event holds")
    names = re.findall(r"`([\w*]+)`", told.partition("\n\n")[0])
    patterns = {name: name.replace("*", r"\w+").replace("_N", r"_\d+") for name in names}
    for found in step.metrics:
        assert any(re.fullmatch(pattern, found) for pattern in patterns.values()), found
    for name in patterns.keys() - set(AT_TIMES.split()):
        assert any(re.fullmatch(patterns[name], found) for found in step.metrics), name
    assert step.metrics["gap_age_1"] > 0
    assert step.metrics["reward"] == pytest.approx(2 / 3)
    assert step.metrics["infra_sandbox_lost"] == 2
    assert step.metrics["staleness_max"] == 1
    assert step.update_s > 0
    assert step.publish_s > 0
    assert later.checkpoint_s > 0


def test_the_trainer_says_when_it_writes_so_that_no_engine_restarts(tiny_config, tiny_model):
    fill_spool(tiny_config, range(6))
    weights, writing = tiny_config.run_dir / "weights", []

    class Publisher(TorchBackend):
        def export_hf(self):
            writing.append(is_quiet(weights))
            return super().export_hf()

    class Reader(ev.NoEvents):
        def write(self, event):
            if isinstance(event, ev.CheckpointEvent | ev.Step):
                writing.append(is_quiet(weights))

    backend = Publisher(tiny_model, tiny_config)
    train(tiny_config, attempt=1, stop=lambda: False, events=Reader(), backend=backend)
    start, step, saved, done = [True], [True, False], [True, False, True], [False, True, True]
    assert writing == start + step + saved + done
    assert not is_quiet(weights)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_is_told_for_good_before_the_checkpoint_that_covers_it(tiny_config, in_background):
    tiny_config.training.checkpoint_every = 1
    tiny_config.training.checkpoint_in_background = in_background
    fill_spool(tiny_config, range(6))
    told, synced, seen = [], [], []

    class Teller(ev.NoEvents):
        def write(self, event):
            if isinstance(event, ev.Step):
                told.append(event.step)
            elif isinstance(event, ev.CheckpointEvent):
                seen.append((event.step, event.step in synced))

        def sync(self):
            synced.extend(told)

    go(tiny_config, events=Teller())
    assert seen == [(1, True), (2, True), (3, True)]


def test_groups_that_cannot_be_trained_are_filtered_with_their_reasons(tiny_config, events):
    tiny_config.training.steps = 1
    dropped = make_group(1, [None, None])
    object.__setattr__(dropped, "dropped", "all_lost")
    [_, _, torn, *_] = put(
        tiny_config,
        make_group(0, [None, 1.0, None, None]),
        dropped,
        make_group(2, [1, 0]),
        make_group(3, [1, 1, 1]),
        make_group(4, [1, 0, 0]),
    )
    torn.write_bytes(torn.read_bytes()[:-20])
    assert go(tiny_config, events=events) == 0
    assert consumed(tiny_config) == {
        0: "filtered:few_graded",
        1: "filtered:all_lost",
        2: "filtered:unreadable",
        3: "filtered:zero_signal",
        4: "trained",
    }
    assert os.listdir(torn.parent) == [f"{torn.name}.bad"]
    drops = [event for event in ev.read(events.path) if isinstance(event, ev.Drop)]
    assert {drop.draw: drop.reason for drop in drops}[2] == "unreadable"
    assert steps_of(events)[0].metrics["filtered_unreadable"] == 1


def test_a_group_older_than_the_bound_is_dropped_as_stale(tiny_config):
    tiny_config.training.steps = 3
    tiny_config.training.max_trained_staleness = 1
    fill_spool(tiny_config, range(4))
    put(tiny_config, make_group(4, [1, 0], version=0))
    put(tiny_config, *(make_group(draw, [1, 0], version=2) for draw in (5, 6)))
    go(tiny_config)
    assert consumed(tiny_config)[4] == "filtered:stale"
    assert consumed(tiny_config)[5] == "trained"


def test_draws_filtered_while_waiting_are_announced_so_that_nodes_go_on(tiny_config):
    put(tiny_config, make_group(0, [None, None]))
    seen = []

    def stop():
        announced = latest(tiny_config.run_dir / "weights")
        seen.append(announced.consumed)
        return announced.consumed == [[0, 0]]

    assert go(tiny_config, stop=stop) == 75
    assert seen[-1] == [[0, 0]]
    assert consumed(tiny_config) == {0: "filtered:few_graded"}


def test_an_attempt_without_a_token_of_the_policy_is_of_its_groups_mean_alone(tiny_config, events):
    tiny_config.training.steps = 1
    group = make_group(1, [1, 0, 0, 0])
    *others, last = group.trajectories
    prompt = int(last.loss_mask.argmax())
    names = ("tokens", "logprobs", "loss_mask")
    cut = {name: getattr(last, name)[:prompt] for name in names}
    silent = replace(last, versions=(), **cut)
    put(tiny_config, make_group(0, [1, 0, 0, 1]), replace(group, trajectories=(*others, silent)))
    assert go(tiny_config, events=events) == 0
    (step,) = steps_of(events)
    found = {name: step.metrics[name] for name in ("graded", "trajectories", "unsampled")}
    assert found == {"graded": 8, "trajectories": 7, "unsampled": 1}


def test_a_batch_without_signal_is_consumed_and_takes_no_step(tiny_config, events):
    tiny_config.training.steps = 1
    put(tiny_config, *(make_group(draw, [1, 1, 1]) for draw in (0, 1)))
    put(tiny_config, *(make_group(draw, [1, 0]) for draw in (2, 3)))
    assert go(tiny_config, events=events) == 0
    assert consumed(tiny_config)[1] == "filtered:zero_signal"
    [step] = steps_of(events)
    assert (step.step, step.version, step.metrics["filtered_zero_signal"]) == (1, 1, 2)


def group_with(draw, **changes):
    """A group whose second trajectory is not as it should be."""
    group = make_group(draw, [1, 0])
    first, second = group.trajectories
    return replace(group, trajectories=(first, replace(second, **changes)))


def like(group, number):
    return np.full(len(group.trajectories[1].tokens), number)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reward": float("nan")}, "no_numbers"),
        ({"reward": float("inf")}, "no_numbers"),
        ({"logprobs": like(make_group(0, [1, 0]), np.nan)}, "no_numbers"),
        ({"logprobs": like(make_group(0, [1, 0]), -np.inf)}, "no_numbers"),
        ({"tokens": like(make_group(0, [1, 0]), VOCABULARY)}, "wrong_tokens"),
        ({"tokens": like(make_group(0, [1, 0]), -1)}, "wrong_tokens"),
        ({"tokens": [], "logprobs": [], "loss_mask": []}, "wrong_tokens"),
    ],
)
def test_a_group_that_no_engine_of_this_model_gave_spoils_no_step(tiny_config, changes, why):
    tiny_config.training.steps = tiny_config.training.groups_per_step = 1
    put(tiny_config, group_with(0, **changes), make_group(1, [1, 0]))
    assert go(tiny_config) == 0
    assert consumed(tiny_config) == {0: f"filtered:{why}", 1: "trained"}


def test_a_token_that_the_engine_held_for_impossible_leaves_every_metric_a_number(
    tiny_config, events
):
    tiny_config.training.steps = tiny_config.training.groups_per_step = 1
    put(tiny_config, group_with(0, logprobs=like(make_group(0, [1, 0]), -1e30)))
    go(tiny_config, events=events)
    [step] = steps_of(events)  # a line with a NaN would not be read as one
    assert 0 < step.metrics["ess"] < 1
    assert step.metrics["ratio"] > 1e100
    assert all(np.isfinite(value) for value in step.metrics.values())


def group_beyond_all(draw):
    """A group whose importance weights, with a cap that is none, are past all gradients."""
    return group_with(draw, logprobs=like(make_group(draw, [1, 0]), -1000.0))


def test_a_step_whose_gradient_is_no_number_is_skipped_and_its_draws_recorded(tiny_config, events):
    tiny_config.training.steps = tiny_config.training.groups_per_step = 1
    tiny_config.training.importance_cap = 1e38
    put(tiny_config, group_beyond_all(0), group_beyond_all(1), make_group(2, [1, 0]))
    assert go(tiny_config, events=events) == 0
    assert consumed(tiny_config) == {0: "filtered:diverged", 1: "filtered:diverged", 2: "trained"}
    [step] = steps_of(events)
    assert step.metrics["filtered_diverged"] == 2
    assert all(torch.isfinite(one).all() for one in final_weights(tiny_config).values())


def test_too_many_such_steps_in_a_row_end_the_run(tiny_config):
    tiny_config.training.groups_per_step, tiny_config.training.importance_cap = 1, 1e38
    put(tiny_config, *map(group_beyond_all, range(5)))
    with pytest.raises(DivergedError, match="weights are unchanged"):
        go(tiny_config)


def test_groups_that_come_during_a_step_are_read_before_the_next(tiny_config):
    intake = Intake(config=tiny_config, consumed={}, events=ev.NoEvents())
    with intake.reading_ahead():
        paths = put(tiny_config, make_group(0, [1, 0]), make_group(1, [1, 0]))
        deadline = time.monotonic() + 60
        while intake.ready < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    for path in paths:
        path.unlink()  # what is read is not read again
    batch = intake.wait(0, lambda: False, lambda: None)
    assert list(batch.outcome) == [0, 1]


def test_a_run_that_never_has_signal_ends_with_an_error(tiny_config):
    tiny_config.training.groups_per_step = 1
    put(tiny_config, *(make_group(draw, [0, 0]) for draw in range(30)))
    with pytest.raises(NoSignalError, match=r"mean reward is 0\.000"):
        go(tiny_config)
    assert len(consumed(tiny_config)) == 25


def test_waiting_has_an_end_that_names_the_missing_draws(tiny_config):
    tiny_config.training.wait_timeout_s = 0.1
    tiny_config.training.groups_per_step = 3
    put(tiny_config, make_group(1, [1, 0]))
    with pytest.raises(WaitTimeout, match="missing draws are 0, 2"):
        go(tiny_config)


def test_stopping_saves_and_resuming_goes_on_from_there(tiny_config, events):
    fill_spool(tiny_config, range(6))
    assert go(tiny_config, stop=stop_after(tiny_config, 1)) == 75
    assert consumed(tiny_config) == dict.fromkeys(range(2), "trained")
    assert go(tiny_config, attempt=2, events=events) == 0
    assert [event.step for event in steps_of(events)] == [2, 3]
    assert latest(tiny_config.run_dir / "weights").attempt == 2


def test_resuming_announces_the_checkpoint_again_under_the_new_attempt(tiny_config):
    fill_spool(tiny_config, range(2))
    go(tiny_config, stop=stop_after(tiny_config, 1))
    before = latest(tiny_config.run_dir / "weights")
    assert go(tiny_config, attempt=2, stop=lambda: True) == 75
    after = latest(tiny_config.run_dir / "weights")
    assert (after.version, after.checksum) == (before.version, before.checksum)
    assert after.identity != before.identity


def test_a_run_that_is_done_only_says_so_again(tiny_config):
    fill_spool(tiny_config, range(6))
    go(tiny_config)
    assert go(tiny_config, attempt=2) == 0
    assert latest(tiny_config.run_dir / "weights").done


@pytest.mark.slow
def test_six_steps_straight_equal_three_and_three_bit_for_bit(tiny_config):
    tiny_config.training.steps = 6
    tiny_config.training.max_trained_staleness = 6  # these groups all come from version 0
    fill_spool(tiny_config, range(12))
    go(tiny_config)
    straight = final_weights(tiny_config)
    tiny_config.name = "halved"
    fill_spool(tiny_config, range(12))
    assert go(tiny_config, stop=stop_after(tiny_config, 3)) == 75
    assert go(tiny_config, attempt=2) == 0
    halved = final_weights(tiny_config)
    assert all(torch.equal(straight[name], halved[name]) for name in straight)


def test_groups_that_come_while_the_trainer_waits_are_taken(tiny_config):
    tiny_config.training.steps = 1
    writing = threading.Timer(0.2, fill_spool, (tiny_config, range(2)))
    writing.start()
    assert go(tiny_config) == 0
    writing.join()
    assert len(consumed(tiny_config)) == 2
