"""mini-swe-agent's YAML, its own files included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl.agent.prompts import TEMPLATES, Prompts
from agentrl.errors import ConfigError

OURS = sorted((Path(__file__).parents[2] / "configs/agents").glob("*.yaml"))
VALUES = {"task": "Fix f.", "n_model_calls": 1, "model_cost": 0.0, "elapsed_seconds": 1}


def upstream_folder() -> Path:
    spec = importlib.util.find_spec("minisweagent")  # found, not imported: it would print a banner
    if spec is None or spec.origin is None:
        pytest.skip("mini-swe-agent is not installed (the extra `benchmarks` brings it)")
    return Path(spec.origin).parent / "config"


@pytest.mark.parametrize(
    "name",
    [
        "mini.yaml",
        "benchmarks/programbench.yaml",
        "benchmarks/swebench.yaml",
        "benchmarks/swebench_backticks.yaml",
        "benchmarks/swebench_xml.yaml",
    ],
)
def test_upstream_yamls_load_and_render_as_they_are(name: str) -> None:
    path = upstream_folder() / name
    prompts = Prompts.load(path)
    system, first = prompts.initial("Fix f.")
    assert system["content"].strip()
    assert "Fix f." in first["content"] or name.endswith("programbench.yaml")
    output = {"output": "x = 1\n", "returncode": 3, "exception_info": ""}
    assert "x = 1" in prompts.observation(output, VALUES)
    stated = yaml.safe_load(path.read_text())
    assert prompts.limits.turns == (stated["agent"]["step_limit"] or None)


def test_upstream_swebench_limits_and_environment_are_taken() -> None:
    prompts = Prompts.load(upstream_folder() / "benchmarks/swebench.yaml")
    assert (prompts.limits.turns, prompts.limits.command_s) == (250, 60)
    assert prompts.env["PAGER"] == "cat"


def test_upstream_xml_pattern_replaces_the_fence() -> None:
    prompts = Prompts.load(upstream_folder() / "benchmarks/swebench_xml.yaml")
    assert prompts.action.findall("<mswea_bash_command>ls</mswea_bash_command>") == ["ls"]


def test_an_upstream_yaml_that_needs_another_names_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"agent\.system_template is None"):
        Prompts.load(upstream_folder() / "benchmarks/swebench_modal.yaml")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_shipped_yamls_load_and_render(path: Path) -> None:
    prompts = Prompts.load(path)
    assert "Fix f." in prompts.initial("Fix f.")[1]["content"]


@pytest.mark.parametrize("name", ["swebench.yaml", "swebench_text.yaml"])
def test_shipped_yamls_for_real_repositories_elide_long_output(name: str) -> None:
    prompts = Prompts.load(Path(__file__).parents[2] / "configs/agents" / name)
    long = {"output": "x" * 50_000, "returncode": 0, "exception_info": ""}
    text = prompts.observation(long, VALUES)
    assert len(text) < 11_000
    assert "40000" in text


@pytest.mark.parametrize("key", TEMPLATES)
def test_a_missing_template_is_named(write_yaml: Callable[..., Path], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        Prompts.load(write_yaml(**{key.replace(".", "__"): None}))


def test_unknown_keys_pass(write_yaml: Callable[..., Path]) -> None:
    prompts = Prompts.load(write_yaml(agent__mode="confirm", model__model_kwargs={"a": 1}))
    assert prompts.sections["agent"]["mode"] == "confirm"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("agent__instance_template", "{{ tsak }}", "'tsak' is undefined"),
        ("agent__instance_template", "{% if %}", "instance_template, its line 1"),
        ("model__observation_template", "{{ output.stdout }}", "no attribute 'stdout'"),
        ("model__observation_template", "{{ ''.__class__.__mro__ }}", "observation_template"),
        ("model__action_regex", "(", "action_regex"),
        ("model__action_regex", "(a)(b)", "2 groups"),
        ("agent__step_limit", -1, "0 or more"),
        ("agent__step_limit", "many", "step_limit='many'"),
        ("environment__env", ["A"], "must map names"),
    ],
)
def test_a_bad_value_is_refused_by_key(
    write_yaml: Callable[..., Path], key: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        Prompts.load(write_yaml(**{key: value}))


@pytest.mark.parametrize("text", ["- a list", "a: [", "agent: 3", ""])
def test_a_file_that_is_no_prompts_yaml_is_refused(odd_path: Path, text: str) -> None:
    path = odd_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        Prompts.load(path)


def test_a_missing_file_is_named(odd_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Prompts.load(odd_path / "none.yaml")


def test_templates_see_no_host_environment(write_yaml: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="'PATH' is undefined"):
        Prompts.load(write_yaml(agent__system_template="{{ PATH }}"))


def test_an_issue_that_looks_like_a_template_stays_text(prompts: Prompts) -> None:
    assert "{{ 7 * 7 }}" in prompts.initial("{{ 7 * 7 }}")[1]["content"]
