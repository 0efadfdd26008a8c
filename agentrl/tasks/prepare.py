"""Makes what a run starts from: the split files and, for `model.init=qwen3`, the model folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, TaskError
from agentrl.handoff.publish import publish_json
from agentrl.tasks.build import build
from agentrl.tasks.load import load_split, split_path
from agentrl.tasks.records import rows_file
from agentrl.tasks.repair import Row, numbered
from agentrl.tasks.rows import read_rows, write_rows
from agentrl.tasks.splits import partition
from agentrl.tasks.validate import validate_all

log = logging.getLogger(__name__)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
UNMADE = ("dataset", "test_setup", "fresh_verifier", "environment", "subset")
"""Keys of tasks that are not made here."""
GENERATOR = 4
"""Raised when the generator changes what a seed gives, so that older folders are made anew."""


def prepare(config: RunConfig) -> None:
    """Make the splits and the model unless folders with the same settings are there.

    JSONL rows of `swesmith` are validated in sandboxes, once; `agentrl validate` does it for every
    form. Raises TaskError when the training tasks are missing or some row cannot decide anything,
    ConfigError for a model that is missing.
    """
    if config.tasks.source == "repair":
        _prepare_tasks(config)
    elif config.tasks.source == "harbor":
        load_split(config.tasks, "train")
    else:
        rows_file(Path(config.tasks.folder), "train", dataset=config.tasks.dataset)
    if config.model.init == "qwen3":
        _prepare_model(config)
    elif not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path}: no config.json there; "
            "give a model's folder, or model.init=qwen3 for a random one"
        )
    if config.tasks.source == "swesmith":
        _validate_rows(config)


def _validate_rows(config: RunConfig) -> None:
    """Validate the splits that training and evaluation read, unless these very files were."""
    record = Path(config.tasks.folder) / "validated.json"
    known = json.loads(record.read_bytes()) if record.is_file() else {}
    for split in dict.fromkeys(("train", config.evaluation.split)):
        path = split_path(config.tasks, split)
        if not path.is_file() or known.get(split) == (digest := sha256(path.read_bytes())):
            continue
        tasks = load_split(config.tasks, split)
        with Progress(*COLUMNS, TimeRemainingColumn()) as progress:
            bar = progress.add_task(f"validating {split}", total=len(tasks))
            faults = asyncio.run(validate_all(config, tasks, lambda: progress.advance(bar)))  # noqa: B023
        if faults:
            told = "\n".join(faults[:20])
            raise TaskError(f"{path}: {len(faults)} of {len(tasks)} tasks decide nothing:\n{told}")
        known[split] = digest
        publish_json(record, known)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _prepare_tasks(config: RunConfig) -> None:
    folder = Path(config.tasks.folder)
    settings = _task_settings(config)
    if _is_same(folder / "manifest.json", settings):
        log.info("tasks in %s are made already", folder)
        return
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "images", ignore_errors=True)
    counts = {
        "sft": config.sft.traces,
        "train": config.tasks.train,
        "held_out": config.tasks.held_out,
        "unseen_sites": config.tasks.unseen_sites,
        "unseen_functions": config.tasks.unseen_functions,
    }
    seed, size = config.tasks.seed, config.tasks.max_functions
    part = partition(seed, config.tasks.functions)
    with Progress(*COLUMNS, TimeRemainingColumn()) as progress:
        for split, count in counts.items():
            bar = progress.add_task(f"tasks: {split}", total=count)
            rows = _counted(progress, bar, islice(build(part, split, size, seed), count))
            write_rows(split_path(config.tasks, split), numbered(rows, split))
    publish_json(folder / "manifest.json", settings)


def _counted(progress: Progress, bar: TaskID, rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        progress.advance(bar)
        yield row


def _task_settings(config: RunConfig) -> dict[str, object]:
    kept = asdict(config.tasks)
    for name in (*UNMADE, "folder", "grade_timeout_s"):
        del kept[name]
    return {"generator": GENERATOR, "sft_traces": config.sft.traces, **kept}


def _prepare_model(config: RunConfig) -> None:
    from agentrl.tasks.model_init import make_model, make_tokenizer, save_model  # torch: seconds

    folder = Path(config.model.path)
    settings = {"seed": config.seed, "model": asdict(config.model), "tasks": _task_settings(config)}
    if _is_same(folder / "made_by_init.json", settings):
        log.info("the model in %s is made already", folder)
        return
    rows = read_rows(split_path(config.tasks, "sft"))
    tokenizer = make_tokenizer((row.problem_statement for row in rows), config.model.vocab_size)
    save_model(folder, make_model(config.model, tokenizer, config.seed), tokenizer, settings)


def _is_same(path: Path, settings: dict[str, object]) -> bool:
    return path.is_file() and json.loads(path.read_text()) == json.loads(json.dumps(settings))
