"""Who still reads which version: one small file a lease, and the pruning that respects them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

import psutil

from agentrl.errors import RecordError
from agentrl.handoff.publish import fsync_folder, publish_json

LEASES = "leases"
REMOTE_LEASE_S = 3600.0
"""A lease from another host, whose process we cannot look up, holds this long."""


def folder_name(version: int) -> str:
    return f"v{version:06d}"


def lease(weights: Path, version: int, owner: str) -> Path:
    """Keep `version` from being pruned until released, or until this process ends.

    Raises RecordError when the version is gone already: read LATEST again and lease that.
    """
    path = _path(weights, version, owner)
    path.parent.mkdir(parents=True, exist_ok=True)
    process = psutil.Process()
    record = {
        "version": version,
        "owner": owner,
        "pid": process.pid,
        "started": process.create_time(),
        "host": socket.gethostname(),
    }
    publish_json(path, record)
    if folder_name(version) not in os.listdir(weights):
        path.unlink(missing_ok=True)
        raise RecordError(
            f"lease of version {version} in {weights} for {owner}: it was pruned; "
            "lease the version that LATEST.json announces now"
        )
    return path


def release(weights: Path, version: int, owner: str) -> None:
    """Give a lease back; one that is gone already is no error."""
    _path(weights, version, owner).unlink(missing_ok=True)


def leased(weights: Path) -> set[int]:
    """Return the versions that a living process holds; leases of dead ones are removed."""
    folder = weights / LEASES
    held = set()
    for name in os.listdir(folder) if folder.is_dir() else []:
        if not name.endswith(".json") or name.startswith("."):
            continue
        if (version := _held(folder / name)) is not None:
            held.add(version)
    return held


def prune(weights: Path, keep: int) -> list[int]:
    """Delete all but the `keep` (1 or more) newest versions; return those deleted.

    Newest is the announced one: a higher number is what a trainer that was since resumed from an
    older checkpoint had left. A leased version stays, and so does the announced one.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} versions: must be 1 or more")
    versions = sorted(
        int(name[1:]) for name in os.listdir(weights) if re.fullmatch(r"v\d{6,}", name)
    )
    newest = _announced(weights)
    if newest is None:
        return []
    current = [version for version in versions if version <= newest]
    doomed = current[:-keep] + [version for version in versions if version > newest]
    held = leased(weights) if doomed else set()
    doomed = [version for version in doomed if version not in held]
    for version in doomed:
        # Renamed first: nobody may see a version with some of its files.
        going = weights / f"{folder_name(version)}.superseded-prune"
        os.rename(weights / folder_name(version), going)
        shutil.rmtree(going)
    if doomed:
        fsync_folder(weights)
    return doomed


def _announced(weights: Path) -> int | None:
    try:
        return int(json.loads((weights / "LATEST.json").read_bytes())["version"])
    except FileNotFoundError:
        return None


def _held(path: Path) -> int | None:
    try:
        record = json.loads(path.read_bytes())
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None
    if _is_alive(record, time.time() - written):
        return int(record["version"])
    path.unlink(missing_ok=True)
    return None


def _is_alive(record: dict[str, object], age_s: float) -> bool:
    if record["host"] != socket.gethostname():
        return age_s < REMOTE_LEASE_S
    try:
        started = psutil.Process(int(str(record["pid"]))).create_time()
    except psutil.NoSuchProcess:
        return False
    return abs(started - float(str(record["started"]))) < 1.0


def _path(weights: Path, version: int, owner: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", owner).lstrip(".")
    return weights / LEASES / f"{folder_name(version)}-{safe}.json"
