"""A toy model's tokens, loaded and proved once for each mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import agent_toys
import pytest
import yaml

from agentrl.agent.prompts import Prompts
from agentrl.agent.tokens import ChatTokens


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_toys.make_tokenizer(tmp_path_factory.mktemp("toy"), agent_toys.template())


@pytest.fixture(scope="session")
def text_tokens(toy_folder: Path) -> ChatTokens:
    return ChatTokens.load(toy_folder, mode="text")


@pytest.fixture(scope="session")
def tool_tokens(toy_folder: Path) -> ChatTokens:
    return ChatTokens.load(toy_folder, mode="tool")


@pytest.fixture
def write_yaml(odd_path: Path) -> Callable[..., Path]:
    """Write a prompts YAML: the small one below, with `section.key` values laid over it."""

    def write(**changes: object) -> Path:
        tree: dict[str, dict[str, object]] = {
            "agent": {"system_template": "Repair.", "instance_template": "Issue: {{task}}"},
            "model": {
                "observation_template": (
                    "{% if output.exception_info %}{{output.exception_info}}\n{% endif %}"
                    "<returncode>{{output.returncode}}</returncode>\n{{output.output}}"
                ),
                "format_error_template": "{{error}} ({{actions|length}}, {{finish_reason}})",
            },
            "environment": {"env": {"PAGER": "cat"}},
        }
        for dotted, value in changes.items():
            section, key = dotted.split("__")
            tree[section][key] = value
            if value is None:
                del tree[section][key]
        path = odd_path / "agent.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture
def prompts(write_yaml: Callable[..., Path]) -> Prompts:
    return Prompts.load(write_yaml())
