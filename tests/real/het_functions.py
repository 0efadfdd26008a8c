"""Functions that the tests of HetSlurmExecutor run as roles, by reference."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

ASKED = ("SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID")


def where(node: int) -> dict[str, str | int]:
    """Tell where this task runs, and with what."""
    print(f"hello from {socket.gethostname()}")
    return {"host": socket.gethostname(), "node": node} | {
        name: os.environ.get(name, "") for name in ASKED
    }


def fail(message: str) -> None:
    raise ValueError(message)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_there(path: str, limit_s: float = 120.0) -> str:
    """Wait for a file, which comes whole, and return its text."""
    deadline = time.monotonic() + limit_s
    while os.path.basename(path) not in os.listdir(os.path.dirname(path)):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.05)
    return Path(path).read_text()


def say_and_wait(folder: str, name: str) -> None:
    """Leave a file that says that this runs, then wait to be killed."""
    Path(folder, name).write_text(str(os.getpid()))
    time.sleep(600)


def until_signal(folder: str) -> str:
    """Return the name of the signal that came."""
    came: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    Path(folder, "ready").write_text("")
    deadline = time.monotonic() + 240
    while not came:
        if time.monotonic() > deadline:
            raise TimeoutError("no signal came")
        time.sleep(0.05)
    return signal.Signals(came[0]).name


def count_lives(folder: str) -> int:
    """In the first life wait to be killed; return the number of the life from the second on."""
    with Path(folder, "lives").open("a") as file:
        file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')}\n")
    lives = len(Path(folder, "lives").read_text().splitlines())
    if lives == 1:
        Path(folder, "ready").write_text("")
        time.sleep(600)
    return lives


def submit_another(folder: str) -> dict[str, object]:
    """Submit a job from inside this one, wait for it, and return what it says of itself."""
    from slurm.het import HetSlurmExecutor

    executor = HetSlurmExecutor(folder)
    executor.update_parameters(
        nodes={"inference": 2}, partition="all", cpus_per_task={"inference": 3}, timeout_min=3
    )
    job = executor.submit({"trainer": where, "inference": where})
    return {"own": os.environ["SLURM_JOB_ID"], "results": job.results()}
