"""From a split's rows to tasks, and from a task to the folder that its sandbox starts from."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

from agentrl.config import TasksConfig
from agentrl.errors import TaskError
from agentrl.handoff.publish import publish_bytes
from agentrl.tasks.harbor import copy_environment, read_harbor
from agentrl.tasks.images import made, make_from_repository, repository_of
from agentrl.tasks.r2egym import read_r2egym
from agentrl.tasks.records import rows_file
from agentrl.tasks.repository import materialise
from agentrl.tasks.rows import read_rows, to_task
from agentrl.tasks.sample import stratified
from agentrl.tasks.splits import SPLITS
from agentrl.tasks.swebench import read_swebench
from agentrl.tasks.swesmith import read_swesmith
from agentrl.tasks.task import Task

log = logging.getLogger(__name__)
READERS: dict[str, Callable[..., list[Task]]] = {
    "swesmith": read_swesmith,
    "swebench": read_swebench,
    "r2egym": read_r2egym,
}
"""By tasks.source, those whose splits are a file of rows each."""


def split_path(config: TasksConfig, split: str) -> Path:
    return Path(config.folder) / f"{split}.jsonl"


def faults_file(config: TasksConfig, split: str) -> Path:
    """Return where `agentrl validate` leaves instance → what is wrong with it."""
    return Path(config.folder) / f"{split}.faults.json"


def load_split(config: TasksConfig, split: str, *, with_faults: bool = False) -> list[Task]:
    """Return the tasks of one split, in file order, without those of its faults file.

    `repair` has the splits sft, train, held_out, unseen_sites and unseen_functions; other sources
    whatever files of rows (`harbor`: folders of task folders) lie in `tasks.folder`. Raises
    TaskError.
    """
    folder = Path(config.folder)
    if config.source == "repair":
        if split not in SPLITS:
            raise TaskError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
        return [to_task(row) for row in read_rows(split_path(config, split))]
    if config.source == "harbor":
        tasks = read_harbor(folder / split, is_fresh=config.fresh_verifier)
    else:
        path = rows_file(folder, split, dataset=config.dataset)
        tasks = READERS[config.source](path, setup=config.test_setup)
    _refuse_twins(tasks, folder / split)
    if not with_faults:
        tasks = _without_faults(tasks, faults_file(config, split))
    return stratified(tasks, config.subset, seed=config.seed)


def image_folder(config: TasksConfig, task: Task) -> Path:
    """Return the folder whose `testbed` is the task's repository; made now where that can be.

    From the row's own files, a git repository in FOLDER/repositories, or the COPY lines of a Harbor
    task. With tasks.environment it only names the row's own image, and validation brings the
    repository out of that. Raises TaskError when it is not there and cannot be made.
    """
    folder = Path(config.folder)
    image = folder / task.image_name
    if not image.resolve().is_relative_to(folder.resolve()):
        image = folder / "images" / task.instance_id  # a registry's name, or a path upwards
    if task.files:
        return materialise(image, task.files)
    if not (image / "testbed").is_dir():
        image = folder / "images" / task.instance_id
    if config.environment and not task.image_name.startswith("images/"):
        return _name_environment(image, config.environment.replace("{image}", task.image_name))
    if (image / "testbed").is_dir():
        return image
    repository = repository_of(folder / "repositories", task)
    if repository is not None:
        return make_from_repository(image, repository, task)
    if task.verifier is not None:
        task_folder = Path(task.verifier.folder).parent
        return made(image, task, functools.partial(copy_environment, task_folder))
    raise TaskError(
        f"task {task.instance_id}: no folder {image / 'testbed'}; prepare its repository there, or "
        f"put a git clone of {task.repo or 'it'} into {folder / 'repositories'}"
    )


def _name_environment(image: Path, reference: str) -> Path:
    """Leave the name of a task's own image for the kinds of sandbox that start from one."""
    if not (image / "environment").is_file():
        publish_bytes(image / "environment", f"{reference}\n".encode())
    return image


def _without_faults(tasks: list[Task], path: Path) -> list[Task]:
    faults = json.loads(path.read_bytes()) if path.is_file() else {}
    good = [task for task in tasks if task.instance_id not in faults]
    if len(good) < len(tasks):
        log.warning("%d of %d tasks are left out: %s", len(tasks) - len(good), len(tasks), path)
    if not good:
        raise TaskError(f"{path} names every task; mend them, then delete it or validate again")
    return good


def _refuse_twins(tasks: list[Task], where: Path) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.instance_id in seen:
            raise TaskError(f"tasks {where}: two rows are {task.instance_id}; drop one")
        seen.add(task.instance_id)
