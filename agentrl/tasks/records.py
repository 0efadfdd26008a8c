"""Rows of a data set from disk: JSONL or Parquet, plain or as NeMo Gym wraps them."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentrl.errors import TaskError
from agentrl.handoff.publish import publish_bytes

T_ = TypeVar("T_")
ENDINGS = (".jsonl", ".parquet")


def rows_file(folder: Path, split: str, *, dataset: str = "") -> Path:
    """Return the file of a split. Raises TaskError when there is none, or more than one.

    dataset: where a split that is not there is fetched from, once.
    """
    found = [path for ending in ENDINGS if (path := folder / f"{split}{ending}").is_file()]
    if not found and dataset:
        found = [fetch(dataset, split, folder / f"{split}.parquet")]
    if len(found) != 1:
        are = " and ".join(path.name for path in found) or "no such file"
        raise TaskError(
            f"tasks {folder / split}{{{','.join(ENDINGS)}}}: {are}; "
            "run `prepare`, set tasks.folder, or put one file of rows there"
        )
    return found[0]


def fetch(dataset: str, split: str, target: Path) -> Path:
    """Write a split of a data set as Parquet: a name on Hugging Face's hub, or a folder.

    Raises TaskError in the words of `datasets`.
    """
    data = io.BytesIO()
    try:
        importlib.import_module("datasets").load_dataset(dataset, split=split).to_parquet(data)
    except ImportError as error:
        raise TaskError(
            f"tasks.dataset={dataset}: {error}; `pip install datasets`, or put the rows in {target}"
        ) from error
    except Exception as error:  # its kinds have no root of their own
        raise TaskError(f"tasks.dataset={dataset}, split {split}: {error}") from error
    publish_bytes(target, data.getvalue())
    return target


def read_records(path: Path, kind: type[T_], form: str) -> list[T_]:
    """Read the rows of a file as `kind`; columns that it does not name are let be.

    form: what the rows are, for the message. Raises TaskError with the line that is no such row.
    """
    found = []
    for number, row in _numbered(path, form):
        try:
            found.append(msgspec.convert(_unwrapped(row), kind))
        except (msgspec.ValidationError, ValueError) as error:
            raise TaskError(f"{path}:{number}: not a row of {form}: {error}") from error
    return found


def ids_of(column: list[str] | str, instance_id: str) -> tuple[str, ...]:
    """Return a column of test ids: a list, or (as in SWE-bench) a list as JSON text.

    Raises TaskError, naming the instance.
    """
    if not isinstance(column, str):
        return tuple(column)
    try:
        return tuple(msgspec.json.decode(column or "[]", type=list[str]))
    except msgspec.DecodeError as error:
        raise TaskError(
            f"task {instance_id}: its tests are {column[:80]!r}, no list as JSON text: {error}"
        ) from error


def _numbered(path: Path, form: str) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise TaskError(f"{path}:{number}: not a row of {form}: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{path}: not a Parquet file: {error}") from error


def _unwrapped(row: Any) -> Any:
    """Return the data set's own row where NeMo Gym's form holds it as JSON text."""
    try:
        metadata = row["responses_create_params"]["metadata"]
    except (KeyError, TypeError):
        return row
    inner = metadata.get("instance_dict", {})
    return {**metadata, **(json.loads(inner) if isinstance(inner, str) else inner)}
