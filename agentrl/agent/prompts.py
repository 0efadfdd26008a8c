"""mini-swe-agent's YAML, read as it is: its prompts, templates and limits, compiled once."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.meta
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError
from agentrl.sandbox.base import TESTBED

log = logging.getLogger(__name__)

Message = dict[str, Any]
ACTION_REGEX = r"```mswea_bash_command\s*\n(.*?)\n```"
"""What mini-swe-agent takes in text mode when `model.action_regex` is not set."""
TEMPLATES = (
    "agent.system_template",
    "agent.instance_template",
    "model.observation_template",
    "model.format_error_template",
)
_jinja = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the YAML states; None where it is silent or says 0, which there means no limit."""

    turns: int | None
    malformed: int | None
    command_s: float | None
    trajectory_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """One agent's words. Templates see mini-swe-agent's variables, but no host environment."""

    path: Path
    sections: Mapping[str, dict[str, Any]]
    """`agent`, `model` and `environment` as they stand in the file."""
    limits: Limits
    env: dict[str, str]
    """Variables that every command gets."""
    action: re.Pattern[str]
    """Finds the actions of a reply in text mode."""
    templates: Mapping[str, jinja2.Template]

    @classmethod
    def load(cls, path: Path | str) -> Prompts:
        """Read and compile `path`. Raises ConfigError that names the key; unknown keys pass."""
        path = Path(path)
        sections = _sections(path)
        shared = _shared(sections)
        prompts = cls(
            path=path,
            sections=sections,
            limits=_limits(path, sections),
            env={key: str(value) for key, value in _env(path, sections).items()},
            action=_action(path, sections["model"]),
            templates={key: _compile(path, sections, key, shared) for key in TEMPLATES},
        )
        prompts._try_all()
        if (cwd := sections["environment"].get("cwd", TESTBED)) != TESTBED:
            log.warning(
                "%s: environment.cwd=%s is not used; commands start in %s", path, cwd, TESTBED
            )
        return prompts

    def initial(self, task: str) -> list[Message]:
        """Return the system and the first user message for an issue's text."""
        values = {"task": task, "n_model_calls": 0, "model_cost": 0.0, "elapsed_seconds": 0}
        return [
            {"role": "system", "content": self._render("agent.system_template", values)},
            {"role": "user", "content": self._render("agent.instance_template", values)},
        ]

    def observation(self, output: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        """Render what a command gave (output, returncode, exception_info)."""
        return self._render("model.observation_template", {**values, "output": output})

    def format_error(self, values: Mapping[str, Any]) -> str:
        """Answer a malformed reply (values: error, actions, finish_reason, has_tool_calls)."""
        return self._render("model.format_error_template", values)

    def _render(self, key: str, values: Mapping[str, Any]) -> str:
        try:
            return self.templates[key].render(values)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{self.path}: {key} does not render: {error}; mend the template "
                f"(it was given {', '.join(sorted(values))} and the file's own keys)"
            ) from error

    def _try_all(self) -> None:
        self.initial("an issue")
        values = {"task": "an issue", "n_model_calls": 1, "model_cost": 0.0, "elapsed_seconds": 1}
        for text in ("", "x" * 20_000):
            output = {"output": text, "returncode": 0, "exception_info": ""}
            self.observation(output, values)
            self.observation({**output, "returncode": -1, "exception_info": "timed out"}, values)
        for finish in ("stop", "length"):
            self.format_error(
                {"error": "none", "actions": [], "finish_reason": finish, "has_tool_calls": False}
            )


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(
            f"agent.prompts={path}: no such file (from {Path.cwd()}); give a YAML's path"
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no mapping; needs the sections agent and model")
    found = {name: tree.get(name) or {} for name in ("agent", "model", "environment")}
    for name, section in found.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name} is {section!r}; must be a mapping")
    return found


def _shared(sections: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the variables that all templates see: the file's keys, then the kernel's name."""
    merged: dict[str, Any] = {}
    for name in ("agent", "environment", "model"):
        merged |= sections[name]
    return merged | platform.uname()._asdict()


def _compile(
    path: Path, sections: Mapping[str, dict[str, Any]], key: str, shared: dict[str, Any]
) -> jinja2.Template:
    section, name = key.split(".")
    source = sections[section].get(name)
    if not isinstance(source, str):
        raise ConfigError(f"{path}: {key} is {source!r}; must be a template, as in mini-swe-agent")
    try:
        used = jinja2.meta.find_undeclared_variables(_jinja.parse(source))
        # Only those: a render copies all globals, which would cost more than the render itself.
        needed = {key: value for key, value in shared.items() if key in used}
        return _jinja.from_string(source, globals=needed)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}: {key}, its line {error.lineno}: {error.message}") from error


def _action(path: Path, model: Mapping[str, Any]) -> re.Pattern[str]:
    source = model.get("action_regex", ACTION_REGEX)
    try:
        pattern = re.compile(source, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{path}: model.action_regex={source!r}: {error}") from error
    if pattern.groups > 1:
        raise ConfigError(
            f"{path}: model.action_regex={source!r} has {pattern.groups} groups; "
            "must have one, around the command"
        )
    return pattern


def _env(path: Path, sections: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    env = sections["environment"].get("env") or {}
    if not isinstance(env, dict):
        raise ConfigError(f"{path}: environment.env={env!r}: must map names to values")
    return env


def _limits(path: Path, sections: Mapping[str, dict[str, Any]]) -> Limits:
    def limit(key: str) -> float | None:
        section, name = key.split(".")
        value = sections[section].get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{path}: {key}={value!r}: must be a number, 0 or more (0: no limit)")
        return value or None

    return Limits(
        turns=cast("int | None", limit("agent.step_limit")),
        malformed=cast("int | None", limit("agent.max_consecutive_format_errors")),
        command_s=limit("environment.timeout"),
        trajectory_s=limit("agent.wall_time_limit_seconds"),
    )
