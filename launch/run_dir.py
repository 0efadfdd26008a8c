"""A run directory as launchers see it: config, provenance, attempts, newest checkpoint.

The schema is imported by what reads a config: it takes longer than all else here, and the first
question of every batch script has no need of it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agentrl.errors import ConfigError, LaunchError
from agentrl.handoff.publish import publish_bytes, publish_json
from launch.jobs import living
from slurm import exit_record, ledger

if TYPE_CHECKING:
    from agentrl.config import RunConfig

STOP = "STOP"
"""A file of this name in a run directory asks its roles to save and end."""
VERSIONS_OF = ("agentrl-slurm", "torch", "transformers", "pyarrow", "submitit", "numpy")


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Open an existing run. Raises ConfigError naming the runs that are there."""
        run = cls(Path(path).absolute())
        if not (run.path / "config.yaml").is_file():
            raise ConfigError(
                f"run {path}: no config.yaml in it (from {Path.cwd()}){_near(run.path)}"
            )
        return run

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stop_file(self) -> Path:
        return self.path / STOP

    def config(self) -> RunConfig:
        """Read what the run uses, the caller's own copy; name and folder are where it now is."""
        path = self.path / "config.yaml"
        stat = path.stat()
        found = copy.deepcopy(_loaded(path, (stat.st_ino, stat.st_mtime_ns)))
        return dataclasses.replace(found, runs_dir=str(self.path.parent), name=self.path.name)

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / f"{number:04d}"

    def attempts(self) -> list[int]:
        """Return the numbers of the launch attempts so far."""
        folder = self.path / "attempts"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def checkpoint_step(self) -> int:
        """Return the step of the newest whole checkpoint, 0 without one."""
        return newest_step(self.path / "checkpoints")

    def write_config(self, config: RunConfig) -> None:
        from agentrl import config as schema

        publish_bytes(self.path / "config.yaml", schema.to_yaml(config).encode())


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, stamp: tuple[int, int]) -> RunConfig:
    """Read a config once for each publication of it: parsing takes a tenth of a second."""
    from agentrl import config as schema

    del stamp
    return schema.load(path)


def newest_step(checkpoints: Path) -> int:
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    found = [re.fullmatch(r"step-(\d+)", name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)


def settled(config: RunConfig) -> RunConfig:
    """Return `config` with absolute paths, so that a run resumes from any folder."""
    return dataclasses.replace(
        config,
        runs_dir=str(Path(config.runs_dir).absolute()),
        model=dataclasses.replace(config.model, path=str(Path(config.model.path).absolute())),
        tasks=dataclasses.replace(config.tasks, folder=str(Path(config.tasks.folder).absolute())),
        agent=dataclasses.replace(config.agent, prompts=str(Path(config.agent.prompts).absolute())),
        image=str(Path(config.image).absolute()) if config.image else "",
    )


def create(
    config: RunConfig, argv: Sequence[str], *, image: Mapping[str, object] | None = None
) -> RunDir:
    """Make the run's directory, or return it if it is this very run already.

    image: facts of the image that it begins in, for its provenance.

    Raises ConfigError if a run of that name has another config.
    """
    run = RunDir(config.run_dir.absolute())
    if (run.path / "config.yaml").is_file():
        differing = differences(run.config(), config)
        if differing:
            raise ConfigError(
                f"run {run.path} exists with another config ({'; '.join(differing[:4])}); go on "
                f"with it by `agentrl resume {run.path}`, or give this one another name=…"
            )
        return run
    run.path.mkdir(parents=True, exist_ok=True)
    publish_json(run.path / "provenance.json", {**provenance(argv), "image": image})
    run.write_config(config)
    return run


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Return `key: old → new` for each key that differs; the folder itself does not count."""
    from agentrl import config as schema

    keys = [key for key in schema.known_keys() if key not in ("runs_dir", "name")]
    pairs = [(key, schema.get(old, key), schema.get(new, key)) for key in keys]
    return [f"{key}: {was!r} → {now!r}" for key, was, now in pairs if was != now]


def provenance(argv: Sequence[str]) -> dict[str, object]:
    """Return what is needed to do it again: code, argv, versions, machine."""
    return {
        "git": git_commit(),
        "argv": list(argv),
        "cwd": str(Path.cwd()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS_OF},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "created": time.time(),
    }


def git_commit() -> dict[str, object]:
    """Return commit and whether files differ from it; empty outside a clone."""
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], check=False, capture_output=True, text=True
        )
        if head.returncode:
            return {}
        status = subprocess.run(
            [*git, "status", "--porcelain"], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        sys.stderr.write("agentrl: git is not installed; provenance.json will lack the commit\n")
        return {}
    return {"commit": head.stdout.strip(), "is_dirty": bool(status.stdout.strip())}


def begin_attempt(run: RunDir, argv: Sequence[str]) -> int:
    """Lay the next launch attempt's folder; return its number. Raises LaunchError if one runs."""
    settle_lost(run)
    number = max(run.attempts(), default=0) + 1
    folder = run.attempt(number)
    (folder / "logs").mkdir(parents=True)
    (folder / "exit").mkdir()
    own = psutil.Process()
    publish_json(
        folder / "launcher.json",
        {
            "pid": own.pid,
            "created": own.create_time(),
            "host": socket.gethostname(),
            "argv": list(argv),
            "step_begin": run.checkpoint_step(),
            "started": time.time(),
        },
    )
    return number


def settle_lost(run: RunDir, *, own_job: str = "") -> None:
    """Write the ledger line of an attempt whose launcher died. Raises LaunchError if it lives.

    own_job: id of the Slurm job that asks; what it began in an earlier life is lost.
    """
    known = {line.attempt for line in ledger.read(run.path)}
    for number in [number for number in run.attempts() if number not in known]:
        launcher = launcher_of(run, number)
        if not (own_job and launcher.get("job") == own_job) and is_living(launcher):
            raise LaunchError(
                f"run {run.path}: attempt {number} still runs ({_named(launcher)}); "
                f"`agentrl stop {run.path}` ends it"
            )
        record = exit_record.read(run.attempt(number), "trainer", 0)
        trainer = f"trainer: {record.message or record.cause}" if record else "trainer: no record"
        ledger.append(
            run.path,
            ledger.LedgerLine(
                attempt=number,
                began=str(launcher.get("began", "unknown")),
                is_by_person=launcher.get("is_by_person") is True,
                ended=f"{_named(launcher)} was lost before it could decide; {trainer}",
                action="lost",
                code=exit_record.FAILED,
                step_begin=_number(launcher.get("step_begin")),
                step_end=run.checkpoint_step(),
                job=str(launcher.get("job", "")),
                restarts=exit_record.restarts(run.attempt(number)),
                started=float(_number(launcher.get("started"))),
            ),
        )


def launcher_of(run: RunDir, number: int) -> dict[str, object]:
    path = run.attempt(number) / "launcher.json"
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def is_living(launcher: dict[str, object]) -> bool:
    """Whether that very process still runs on this host, or that job is queued or runs."""
    job = launcher.get("job")
    if isinstance(job, str) and job:
        return bool(living([job]))
    pid = launcher.get("pid")
    if not isinstance(pid, int) or launcher.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(pid)
        same = process.create_time() == launcher.get("created")
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_line(command: str, argv: Sequence[str]) -> list[str]:
    return ["agentrl", command, *argv]


def _named(launcher: dict[str, object]) -> str:
    """Name who launched an attempt: a job, or a process of this host."""
    if launcher.get("job"):
        return f"job {launcher['job']}, restart {launcher.get('restart', 0)}"
    return f"the launcher, pid {launcher.get('pid', '?')},"


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _near(path: Path) -> str:
    folders = path.parent.iterdir() if path.parent.is_dir() else ()
    names = sorted(folder.name for folder in folders if (folder / "config.yaml").is_file())
    return f"; runs beside it: {', '.join(names)}" if names else "; give a run directory"


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow, and a start has no need

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
