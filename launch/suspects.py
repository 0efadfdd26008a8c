"""Nodes that a run's inference roles have found broken: its next jobs stay away from them.

A role writes attempts/NNNN/suspect-NODE.json (agentrl.rollout.node) when engines of its node keep
failing. Who wants such a node again removes that file; a day later it counts no more.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from launch.network import host_of
from launch.run_dir import RunDir

KEPT_S = 24 * 3600.0
PREFIX, SUFFIX = "suspect-", ".json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    host: str
    """Slurm's name of the node."""
    reason: str
    file: Path


def suspects(run: RunDir) -> list[Suspect]:
    """Return those of the last day, each node once, with what was said of it last."""
    found: dict[str, Suspect] = {}
    for number in run.attempts():
        folder = run.attempt(number)
        for name in sorted(os.listdir(folder)):
            node = name.removeprefix(PREFIX).removesuffix(SUFFIX)
            if f"{PREFIX}{node}{SUFFIX}" != name or not node.isdigit():
                continue
            host = host_of(run, number, "inference", int(node))
            if host and time.time() - (folder / name).stat().st_mtime < KEPT_S:
                reason = str(json.loads((folder / name).read_bytes()).get("reason", ""))
                found[host] = Suspect(host=host, reason=reason, file=folder / name)
    return list(found.values())
