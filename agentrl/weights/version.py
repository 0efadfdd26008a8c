"""Versions of the weights in a run directory: published whole, announced last, pruned by lease.

`weights/v000012/` is a Hugging Face folder; `weights/LATEST.json` says which one counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agentrl.errors import PublishError, RecordError
from agentrl.handoff.publish import fsync_folder, publish_json
from agentrl.weights.lease import folder_name, lease, leased, prune, release

if TYPE_CHECKING:  # an inference node's processes read announcements only: seconds, and 300 MB each
    import torch

__all__ = [
    "Announced",
    "Stamp",
    "announce",
    "folder_name",
    "latest",
    "latest_stamp",
    "lease",
    "leased",
    "prune",
    "publish_version",
    "reannounce",
    "release",
    "tensor_checksum",
]

LATEST = "LATEST.json"
Offer = Callable[[dict[str, "torch.Tensor"]], str]
"""Given a version's tensors, on the CPU, prepares another way for them; returns the transport."""
Stamp = tuple[int, int, int]
WEIGHTS_FILE = "model.safetensors"
COPIED = ("config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """What LATEST.json says: the version that engines have to prove."""

    version: int
    step: int
    folder: Path
    run: str
    attempt: int
    """Launch attempt that published it; after a resume, version numbers may come again."""
    checksum: str
    """`tensor_checksum` of its tensors."""
    files: dict[str, str]
    """sha256 by file name."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by file name."""
    consumed: list[list[int]] = field(default_factory=list)
    """Draws consumed so far, as [first, last] ranges."""
    done: bool = False
    """No version follows: the run is over."""
    transport: str = "disk"

    @property
    def identity(self) -> tuple[int, int, str]:
        """Changes whenever engines must load again."""
        return self.attempt, self.version, self.checksum


def tensor_checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 (hex) that trainer and engine compare.

    Over name, dtype, shape and raw little-endian bytes of each tensor, by sorted name.
    A tied tensor counts once, under the name that `named_parameters()` gives it.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def publish_version(
    weights: Path,
    *,
    run: str,
    attempt: int,
    version: int,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    model_folder: Path,
    consumed: list[list[int]],
    done: bool = False,
    transport: str | Offer = "disk",
) -> Announced:
    """Write `weights/v…/` whole, ask an offer for its transport, then announce the version.

    A folder of that version from an earlier launch attempt is used as it is when its bytes are the
    same, else replaced. Raises PublishError when the disk refuses; what was announced before stays
    intact and announced, and no temporary folder is left.
    """
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    target = weights / folder_name(version)
    temporary = weights / f"{target.name}.tmp-{attempt:04d}"
    try:
        weights.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(weights)
        files = _write_folder(temporary, named, model_folder)
        _move_in(temporary, target, files, attempt)
        announced = Announced(
            version=version,
            step=step,
            folder=target,
            run=run,
            attempt=attempt,
            checksum=tensor_checksum(named.items()),
            files=files,
            sizes={name: (target / name).stat().st_size for name in files},
            consumed=consumed,
            done=done,
            transport=transport if isinstance(transport, str) else transport(named),
        )
        announce(weights, announced)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise PublishError(
            f"publishing version {version} into {weights}: {error}; the version announced before "
            "it stays. Free space there, then resume the run"
        ) from error
    return announced


def announce(weights: Path, announced: Announced) -> None:
    """Make LATEST.json say `announced`, whose folder is complete already."""
    record = dataclasses.asdict(announced)
    record["folder"] = announced.folder.name
    publish_json(weights / LATEST, record)


def reannounce(
    weights: Path,
    announced: Announced,
    *,
    consumed: list[list[int]] | None = None,
    done: bool | None = None,
) -> Announced:
    """Announce the same weights with a newer `consumed`, or as the last; return what now holds."""
    newer = dataclasses.replace(
        announced,
        consumed=announced.consumed if consumed is None else consumed,
        done=announced.done if done is None else done,
    )
    announce(weights, newer)
    return newer


def latest(weights: Path) -> Announced | None:
    """Return what is announced, None before the first version.

    Raises RecordError for a torn LATEST.json, or one whose folder is missing or of other sizes.
    """
    announced = _read_latest(weights)
    if announced is None:
        return None
    problem = _problem(announced)
    if problem and (again := _read_latest(weights)) is not None and again != announced:
        announced, problem = again, _problem(again)  # it was pruned between our two looks
    if problem:
        raise RecordError(f"{weights / LATEST}: announces version {announced.version}, {problem}")
    return announced


def latest_stamp(weights: Path) -> Stamp | None:
    """Return what differs whenever LATEST.json is another file; None before the first version.

    The folder is listed first: over NFS a file renamed over another is not seen otherwise.
    """
    if not weights.is_dir() or LATEST not in os.listdir(weights):
        return None
    try:
        found = os.stat(weights / LATEST)
    except OSError:  # ESTALE, as it was replaced
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_latest(weights: Path) -> Announced | None:
    if not weights.is_dir() or LATEST not in os.listdir(weights):
        return None
    path = weights / LATEST
    try:
        return _parse(json.loads(path.read_bytes()), weights)
    except (ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{path}: not an announcement ({error}); the trainer writes a new one when resumed"
        ) from error


def _parse(record: Mapping[str, Any], weights: Path) -> Announced:
    kinds = {
        "version": int,
        "step": int,
        "attempt": int,
        "run": str,
        "checksum": str,
        "folder": str,
    }
    for name, kind in kinds.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"{name}={record[name]!r} is not of type {kind.__name__}")
    return Announced(**{**record, "folder": weights / record["folder"]})


def _problem(announced: Announced) -> str:
    folder = announced.folder
    if folder.name not in os.listdir(folder.parent):
        return f"but {folder} is not there"
    found = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    for name, size in announced.sizes.items():
        if found.get(name) != size:
            return f"but {folder / name} has {found.get(name)} bytes instead of {size}"
    return ""


def _write_folder(
    folder: Path, named: dict[str, torch.Tensor], model_folder: Path
) -> dict[str, str]:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    for name in COPIED:
        if (source := model_folder / name).is_file():
            shutil.copyfile(source, folder / name)
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    fsync_folder(folder)
    return files


def _move_in(temporary: Path, target: Path, files: dict[str, str], attempt: int) -> None:
    if target.name in os.listdir(target.parent):
        if _digests(target) == files:
            shutil.rmtree(temporary)
            return
        superseded = target.with_name(f"{target.name}.superseded-{attempt:04d}")
        os.rename(target, superseded)
        os.rename(temporary, target)
        shutil.rmtree(superseded)
    else:
        os.rename(temporary, target)
    fsync_folder(target.parent)


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _remove_leftovers(weights: Path) -> None:
    """Remove what a killed trainer left half done; a run has one trainer at a time."""
    for name in os.listdir(weights):
        if ".tmp-" in name or ".superseded-" in name or name.endswith(".tmp"):
            path = weights / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
