"""Checkpoints: written whole, verified by hash, and never pickled.

`step-000120.tmp-ATTEMPT/` → files, each fsynced; with several ranks, each rank's own (shares) →
manifest.json (size and sha256 of each file) → rename → LATEST.json. Which one counts is found by
listing and verifying; LATEST.json is for people and for the verdict. The consumed draws in a
checkpoint are the only record of consumption.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.errors import CheckpointError, PublishError, RecordError
from agentrl.events import CheckpointEvent, NoEvents, Writer, now
from agentrl.handoff.publish import fsync_folder, publish_json
from agentrl.rollout.draws import DrawSet
from agentrl.training import rng
from agentrl.training.backend import BackendState, Part
from agentrl.training.model_folder import copy_side_files
from agentrl.training.shares import await_shares, digests, entry, read_tensors, write_share
from agentrl.training.weight_files import INDEX

MANIFEST = "manifest.json"
TRAINED = "trained"
FILTERED = "filtered:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """All that a resumed trainer needs."""

    step: int
    version: int
    """Always equal to step: a version is the weights after that many steps."""
    backend: BackendState
    consumed: dict[int, str] = field(default_factory=dict)
    """`trained` or `filtered:REASON` by draw."""
    pending: dict[str, float] = field(default_factory=dict)
    """Counts that no step event has reported yet."""
    config_hash: str = ""
    rng: dict[str, Any] = field(default_factory=rng.capture)


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def save(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    attempt: int,
    keep: int,
    model_folder: Path,
    events: Writer | None = None,
) -> Path:
    """Write `folder/step-…/`, verify it, then delete all but the newest `keep` good ones.

    Raises PublishError when the disk refuses; older checkpoints are untouched then.
    """
    temporary = begin(folder, checkpoint.step, attempt)
    files = Files(model_folder=model_folder, keep=keep, attempt=attempt)
    return complete(temporary, checkpoint, files, events)


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What a checkpoint's files are besides its own state."""

    model_folder: Path
    """Whose config and tokenizer go with it."""
    keep: int
    """Good checkpoints kept, this one included."""
    attempt: int
    ranks: int = 1
    """That write a share each."""
    limit_s: float = 600.0
    """Longest that the others' shares may take."""


def begin(folder: Path, step: int, attempt: int) -> Path:
    """Make the folder that all ranks write into. Raises PublishError when the disk refuses."""
    temporary = folder / f"{folder_name(step)}.tmp-{attempt:04d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
    except OSError as error:
        raise _refused(temporary, error) from error
    return temporary


def complete(
    temporary: Path, checkpoint: Checkpoint, files: Files, events: Writer | None = None
) -> Path:
    """Write rank 0's share and the rest of what was begun, await the others', and move it in."""
    started, folder = now(), temporary.parent
    target = folder / folder_name(checkpoint.step)
    try:
        _write(temporary, checkpoint, files)
        _move_in(temporary, target)
        publish_json(folder / "LATEST.json", {"step": checkpoint.step, "folder": target.name})
    except (OSError, SafetensorError, PublishError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _refused(target, error) from error
    verify(target)
    _retain(folder, files.keep, target)
    (events or NoEvents()).write(
        CheckpointEvent(
            step=checkpoint.step, phase="saved", path=str(target), start=started, end=now()
        )
    )
    return target


def _refused(path: Path, error: Exception) -> PublishError:
    return PublishError(
        f"saving checkpoint {path}: {error}; older checkpoints are untouched. "
        "Free space there, then resume the run"
    )


def tidy(folder: Path, loaded: Checkpoint, keep: int) -> None:
    """Finish, for the checkpoint just loaded, what a trainer killed while saving had not done."""
    _remove_leftovers(folder)
    name = folder_name(loaded.step)
    publish_json(folder / "LATEST.json", {"step": loaded.step, "folder": name})
    _retain(folder, keep, folder / name)


def load_latest(folder: Path, events: Writer | None = None) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, None when there is none at all.

    One that does not verify is passed over with an event `refused`. Raises CheckpointError when
    there are some, and none verifies: starting over would lose the run without a word.
    """
    events = events or NoEvents()
    refused = []
    for path in _found(folder):
        started = now()
        try:
            verify(path)
            checkpoint = _read(path)
        except RecordError as error:
            refused.append(str(error))
            step = _step_of(path.name)
            events.write(
                CheckpointEvent(step=step, phase="refused", path=str(path), detail=str(error))
            )
            continue
        rng.restore(checkpoint.rng)
        events.write(
            CheckpointEvent(
                step=checkpoint.step, phase="loaded", path=str(path), start=started, end=now()
            )
        )
        return checkpoint
    if refused:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {'; '.join(refused)}. "
            "Restore one, or start a new run under another name"
        )
    return None


def read_consumed(folder: Path) -> dict[int, str]:
    """Return `trained` or `filtered:REASON` for each consumed draw; {} before any checkpoint.

    folder: `checkpoints/`, whose newest good one is taken, or one `step-…/` in it.
    """
    if (folder / MANIFEST).is_file():
        verify(folder)
        return _read_consumed(folder)
    refused = []
    for path in _found(folder):
        try:
            verify(path)
        except RecordError as error:
            refused.append(str(error))
            continue
        return _read_consumed(path)
    if refused:
        raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(refused)}")
    return {}


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest of one checkpoint after checking every file against it, or raise."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        wanted = {
            path / name: (told["size"], told["sha256"]) for name, told in manifest["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable ({error!r})") from error
    try:
        for file, (told, _) in wanted.items():
            size = file.stat().st_size if file.is_file() else None
            if size != told:
                raise CheckpointError(f"{file}: {size} bytes, its manifest says {told}")
        for file, digest in digests(list(wanted)):
            if digest != wanted[file][1]:
                raise CheckpointError(f"{file}: its sha256 is not the manifest's; it was changed")
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return manifest


def _write(folder: Path, checkpoint: Checkpoint, files: Files) -> None:
    copy_side_files(files.model_folder, folder)
    head = {
        "step": checkpoint.step,
        "version": checkpoint.version,
        "config_hash": checkpoint.config_hash,
    }
    updates = checkpoint.backend.updates
    rest = {"updates": updates, "pending": checkpoint.pending, "rng": checkpoint.rng}
    (folder / "state.json").write_text(json.dumps({**head, **rest}))
    (folder / "consumed.json").write_text(json.dumps(_compact(checkpoint.consumed)))
    write_share(folder, checkpoint.backend, Part(0, files.ranks))
    shares = await_shares(folder, files.ranks, files.limit_s)
    if files.ranks > 1:
        publish_json(folder / INDEX, _index(shares))
    own = [path for path in sorted(folder.iterdir()) if path.name not in shares]
    entries = {path.name: entry(path) for path in own} | {
        name: {"size": told["size"], "sha256": told["sha256"]} for name, told in shares.items()
    }
    publish_json(folder / MANIFEST, {**head, "attempt": files.attempt, "files": entries})


def _index(shares: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return transformers' index of a model in several files."""
    where = {name: file for file, told in shares.items() for name in told["tensors"]}
    size = sum(told["size"] for told in shares.values() if told["tensors"])
    return {"metadata": {"total_size": size}, "weight_map": where}


def _move_in(temporary: Path, target: Path) -> None:
    if target.name in os.listdir(target.parent):
        # Refused once, or saved at this step with fewer draws; readers find it under both names.
        superseded = target.with_name(f"{target.name}.superseded")
        os.rename(target, superseded)
        os.rename(temporary, target)
        shutil.rmtree(superseded)
    else:
        os.rename(temporary, target)
    fsync_folder(target.parent)


def _read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / "state.json").read_bytes())
        names = os.listdir(path)
        return Checkpoint(
            step=state["step"],
            version=state["version"],
            backend=BackendState(
                model=read_tensors(path, "model", names),
                optimizer=read_tensors(path, "optimizer", names),
                updates=state["updates"],
            ),
            consumed=_read_consumed(path),
            pending=state["pending"],
            config_hash=state["config_hash"],
            rng=state["rng"],
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: verified, yet not readable ({error!r})") from error


def _compact(consumed: dict[int, str]) -> dict[str, list[list[int]]]:
    reasons = sorted(set(consumed.values()))
    return {
        reason: DrawSet(draw for draw, why in consumed.items() if why == reason).to_ranges()
        for reason in reasons
    }


def _read_consumed(path: Path) -> dict[int, str]:
    try:
        table = json.loads((path / "consumed.json").read_bytes())
        pairs = [(draw, why) for why, spans in table.items() for draw in DrawSet.from_ranges(spans)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / 'consumed.json'}: not readable ({error!r})") from error
    return dict(sorted(pairs))


def _found(folder: Path) -> list[Path]:
    """Return the complete checkpoints, newest first."""
    names: Iterable[str] = os.listdir(folder) if folder.is_dir() else ()
    steps = [name for name in names if re.fullmatch(r"step-\d{6,}(\.superseded)?", name)]
    return [folder / name for name in sorted(steps, key=lambda name: (-_step_of(name), name))]


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


def _retain(folder: Path, keep: int, verified: Path) -> None:
    good = 0
    for path in _found(folder):
        if good >= keep:
            going = path.with_name(f"{path.name}.going")
            os.rename(path, going)
            shutil.rmtree(going)
        elif path == verified or _is_good(path):
            good += 1  # a bad one is not counted, and kept for a person to look at


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed trainer left half done; a run has one trainer at a time."""
    for name in os.listdir(folder):
        plain = name.removesuffix(".superseded")
        if plain != name and not (folder / plain).exists():
            os.rename(folder / name, folder / plain)
        elif plain != name or ".tmp-" in name or name.endswith(".going"):
            shutil.rmtree(folder / name)
        elif name.endswith(".tmp"):
            (folder / name).unlink()
