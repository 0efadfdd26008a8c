"""The trainer's word to a node: these of its engines sample other than their weights say.

One file a node in the attempt's folder, published before a version and read when one is announced.
An engine is named by its address, which belongs to one life of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from agentrl.handoff.publish import publish_json


def ask(attempt_dir: Path, node: int, reasons: Mapping[str, str]) -> None:
    """Name engines of `node` by address, each with its reason; replaces what was asked before."""
    publish_json(attempt_dir / _name(node), dict(reasons))


def asked(attempt_dir: Path, node: int) -> dict[str, str]:
    """Return the engines that the trainer named last, with the reasons."""
    if not attempt_dir.is_dir() or _name(node) not in os.listdir(attempt_dir):
        return {}
    found: dict[str, str] = json.loads((attempt_dir / _name(node)).read_bytes())
    return found


def _name(node: int) -> str:
    return f"quarantine-{node}.json"
