"""Config: one schema, layers in one order, and errors that name what is near."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import config, config_checks
from agentrl.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_empty_file_gives_the_defaults(odd_path: Path) -> None:
    assert config.load(write(odd_path, "{}")) == config.RunConfig()


def test_a_key_of_the_file_is_taken(odd_path: Path) -> None:
    assert config.load(write(odd_path, "training: {steps: 7}")).training.steps == 7


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("training: {stepz: 7}", "training.steps"),
        ("steps: 7", "training.steps"),
        ("sandbox: {memory: 7}", "sandbox.memory_mb"),
    ],
)
def test_an_unknown_key_names_its_neighbours(tmp_path: Path, text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"run.yaml: unknown key .*; near it are .*{near}"):
        config.load(write(tmp_path, text))


def test_a_section_given_as_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training is a section; give its keys"):
        config.load(write(tmp_path, "training: 7"))


def test_a_value_of_another_type_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"many.*training\.steps"):
        config.load(write(tmp_path, "training: {steps: many}"))


def test_a_choice_that_is_none_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.kind='bublewrap'.*did you mean 'bubblewrap'"):
        config.load(write(tmp_path, "sandbox: {kind: bublewrap}"))


@pytest.mark.parametrize(("inner", "outer"), list(pairwise(config_checks.NESTED)))
def test_timeouts_that_do_not_nest_are_refused(tmp_path: Path, inner: str, outer: str) -> None:
    limit = config.get(config.RunConfig(), outer)
    with pytest.raises(ConfigError, match=f"timeouts do not nest: {inner}=.*{outer}="):
        config.load(write(tmp_path, "{}"), [f"{inner}={limit}"])


@pytest.mark.parametrize("key", config_checks.POSITIVE)
def test_counts_below_one_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=0: must be 1 or more"):
        config.load(write(tmp_path, "{}"), [f"{key}=0"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agent.tokens_per_trajectory=100000", "over engine.context_length"),
        ("rollout.min_group=1", "must be 2 to"),
        ("rollout.min_group=99", "must be 2 to"),
        ("rollout.max_infra_rate=0", "over 0, at most 1"),
        ("rollout.max_staleness=-1", "must be 0 or more"),
        ("agent.temperature=0", "so must be over 0"),
        ("training.lr=-1e-6", "training.lr=-1e-06: must be 0 or more"),
        ("training.lr=.nan", "must be 0 or more, and a number"),
        ("training.importance_cap=.inf", "must be 0 or more, and a number"),
        ("training.max_grad_norm=0", "must be over 0"),
        ("training.checkpoint_timeout_s=.inf", "must be over 0, and a number"),
        ("training.beta2=1", "0 or more and under 1"),
        ("training.entropy_coef=.nan", "must be a number"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, "{}"), [override])


def test_the_order_is_defaults_extended_file_command_line(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\nname: base\ntraining: {steps: 1, lr: 0.1}", "base.yaml")
    write(tmp_path, "extends: base.yaml\nseed: 2\ntraining: {steps: 2}", "middle.yaml")
    path = write(tmp_path, "extends: middle.yaml\ntraining: {steps: 3}")
    found = config.load(path, ["training.steps=4"])
    assert (found.name, found.seed, found.training.lr, found.training.steps) == ("base", 2, 0.1, 4)
    assert found.training.beta1 == config.TrainingConfig().beta1


def test_of_two_extended_files_the_later_wins(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\nname: one", "one.yaml")
    write(tmp_path, "seed: 2", "two.yaml")
    found = config.load(write(tmp_path, "extends: [one.yaml, two.yaml]"))
    assert (found.name, found.seed) == ("one", 2)


def test_extends_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write(tmp_path / "models", "extends: size.yaml", "tiny.yaml")
    write(tmp_path / "models", "model: {layers: 2}", "size.yaml")
    assert config.load(write(tmp_path, "extends: models/tiny.yaml")).model.layers == 2


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml", "a.yaml")
    write(tmp_path, "extends: a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: extends itself by way of .*b\.yaml"):
        config.load(tmp_path / "a.yaml")


def test_one_file_may_be_extended_along_two_ways(tmp_path: Path) -> None:
    write(tmp_path, "seed: 5", "root.yaml")
    write(tmp_path, "extends: root.yaml", "left.yaml")
    write(tmp_path, "extends: root.yaml", "right.yaml")
    assert config.load(write(tmp_path, "extends: [left.yaml, right.yaml]")).seed == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not readable as YAML"),
        ("- 1", "holds no mapping"),
        ("extends: no.yaml", "no such file"),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, text))


def test_a_config_that_is_not_there_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file \(from "):
        config.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("override", ["training.steps", "--training.steps=1"])
def test_an_override_without_key_and_value_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="must read key=value"):
        config.load(write(tmp_path, "{}"), [override])


@pytest.mark.parametrize("override", ["name=[1", "name=${seed"])
def test_an_override_that_is_no_yaml_says_so(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="not readable as YAML"):
        config.load(write(tmp_path, "{}"), [override])


def test_an_unknown_override_names_its_neighbours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"near it are training\.steps"):
        config.load(write(tmp_path, "{}"), ["training.step=1"])


def test_a_saved_config_loads_to_the_same(odd_path: Path) -> None:
    found = replace(config.RunConfig(), name="my run: #1 'x'", seed=7)
    config.save(found, odd_path / "config.yaml")
    assert config.load(odd_path / "config.yaml") == found


@settings(max_examples=8, deadline=None)
@given(
    name=st.text(st.characters(categories=["L", "N", "P", "Z"]), min_size=1, max_size=20),
    lr=st.floats(1e-9, 1.0),
    steps=st.integers(1, 10**6),
)
def test_any_saved_value_loads_to_the_same(tmp_path_factory, name, lr, steps) -> None:
    training = replace(config.TrainingConfig(), lr=lr, steps=steps)
    found = replace(config.RunConfig(), name=name, training=training)
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    config.save(found, path)
    assert config.load(path) == found


def test_every_key_can_be_overridden_by_its_own_default(tmp_path: Path) -> None:
    default = config.RunConfig()
    overrides = [f"{key}={config.get(default, key)}" for key in config.known_keys()]
    assert config.load(write(tmp_path, "{}"), overrides) == default
