"""From split files to tasks, and from a task to the folder that its sandbox starts from."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import TasksConfig
from agentrl.errors import TaskError
from agentrl.tasks.repository import materialise
from agentrl.tasks.rows import read_foreign, read_rows, to_task
from agentrl.tasks.splits import SPLITS
from agentrl.tasks.task import Task


def split_path(config: TasksConfig, split: str) -> Path:
    return Path(config.folder) / f"{split}.jsonl"


def load_split(config: TasksConfig, split: str) -> list[Task]:
    """Return the tasks of one split, in file order. Raises TaskError.

    `repair` has the splits sft, train, held_out, unseen_sites and unseen_functions;
    `swesmith` whatever JSONL files lie in `tasks.folder`.
    """
    if config.source == "swesmith":
        return read_foreign(split_path(config, split))
    if split not in SPLITS:
        raise TaskError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    return [to_task(row) for row in read_rows(split_path(config, split))]


def image_folder(config: TasksConfig, task: Task) -> Path:
    """Return the folder whose `testbed` is the task's repository; a generated one is made now.

    Raises TaskError when a prepared one is not there.
    """
    folder = Path(config.folder)
    image = folder / task.image_name
    if not image.resolve().is_relative_to(folder.resolve()):
        image = folder / "images" / task.instance_id  # a registry's name, or a path upwards
    if task.files:
        return materialise(image, task.files)
    if not (image / "testbed").is_dir():
        image = folder / "images" / task.instance_id
    if not (image / "testbed").is_dir():
        raise TaskError(
            f"task {task.instance_id}: no folder {image / 'testbed'}; prepare its repository there"
        )
    return image
