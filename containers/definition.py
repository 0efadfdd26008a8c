"""Definition files as values, and what is wrong with one: pure, before any build begins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ImageError

FOLDER = Path(__file__).parent
NAMES = ("cpu", "cuda", "rocm", "sandbox")
"""Definition files that ship here."""
ARGUMENT = re.compile(r"\{\{ *(\w+) *\}\}")
PINNED = re.compile(r"\b([A-Za-z][\w.-]*)==([\w.+]+)")
BOOTSTRAPS = ("debootstrap", "docker", "localimage", "oras", "library")


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One definition file."""

    path: Path
    text: str
    header: dict[str, str]
    """Keys in lower case."""
    sections: dict[str, str]

    @property
    def arguments(self) -> set[str]:
        """Names that --build-arg has to give."""
        return set(ARGUMENT.findall(self.text))

    @property
    def labels(self) -> dict[str, str]:
        lines = (line.split(None, 1) for line in self.sections.get("labels", "").splitlines())
        return {words[0]: words[1] for words in lines if len(words) == 2}


def find(name: str) -> Path:
    """Return the definition file of a shipped name, or a path. Raises ImageError naming them."""
    if name in NAMES:
        return FOLDER / f"{name}.def"
    if Path(name).is_file():
        return Path(name)
    raise ImageError(
        f"image build {name}: no such definition; there are {', '.join(NAMES)}, or give the path "
        "of a definition file"
    )


def parse(path: Path) -> Definition:
    """Read a definition file. Raises ImageError where it has no header."""
    text = path.read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    header: dict[str, str] = {}
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        if match := re.match(r"%(\w+)", line):
            current = sections.setdefault(match[1], [])
        elif current is not None:
            current.append(line)
        elif match := re.match(r"(\w+) *: *(.+?) *$", line):
            header[match[1].lower()] = match[2]
    if "bootstrap" not in header:
        raise ImageError(f"{path}: no `Bootstrap:` line; it is no definition file of Apptainer")
    bodies = {name: "\n".join(body).strip("\n") for name, body in sections.items()}
    return Definition(path=path, text=text, header=header, sections=bodies)


def pins() -> dict[str, Any]:
    """Return pins.yaml."""
    return dict(yaml.safe_load((FOLDER / "pins.yaml").read_text()))


def complaints(definition: Definition, table: dict[str, Any]) -> list[str]:
    """Return what is wrong with one of our own definition files, a line each."""
    found = _of_base(definition, table)
    missing = sorted(set(table["labels"]) - set(definition.labels))
    found += [f"%labels lacks {name}" for name in missing]
    if gpu := definition.labels.get("agentrl.gpu", "none"):
        found += [] if gpu in ("none", "rocm", "cuda") else [f"agentrl.gpu {gpu}: no kind we know"]
    unknown = sorted(definition.arguments - set(table["arguments"]))
    found += [f"{{{{ {name} }}}}: nothing gives it" for name in unknown]
    for name, version in PINNED.findall("\n".join(definition.sections.values())):
        wanted = table["packages"].get(name, {}).get("version")
        if wanted != version:
            found.append(f"{name}=={version}: pins.yaml has {wanted or 'no such package'}")
    body = definition.sections.get("post", "").strip()
    if not body.startswith("set -eu"):
        found.append("%post must begin with `set -eu`: Apptainer goes on after a failed line else")
    if "environment" not in definition.sections:
        found.append("%environment is missing")
    return found


def _of_base(definition: Definition, table: dict[str, Any]) -> list[str]:
    header = definition.header
    kind = header["bootstrap"]
    if kind not in BOOTSTRAPS:
        return [f"Bootstrap: {kind}: no agent of Apptainer that we know"]
    if kind == "debootstrap":
        suite = header.get("osversion", "")
        return [] if suite in table["suites"] else [f"OSVersion: {suite}: not in pins.yaml"]
    if kind != "docker":
        return []
    known = {f"{base['name']}@{base['digest']}": base for base in table["bases"].values()}
    base = known.get(header.get("from", ""))
    if base is None:
        return [f"From: {header.get('from', '')}: not a NAME@sha256:… of pins.yaml"]
    if f"{base['name']}:{base['tag']}" not in definition.text:
        return [f"the comment must name the tag {base['name']}:{base['tag']}"]
    return []
