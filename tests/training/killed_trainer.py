"""Fault injector: runs the real training loop and has the kernel SIGKILL it before a disk call.

`killed_trainer.py ROOT` tries call 0, 1, 2, … until a run ends by itself. For each it forks a child
whose os.fsync, os.rename, os.replace, os.unlink and os.rmdir count their calls, and which kills
itself on reaching that one; a second child then resumes without faults. One JSON line a case goes
to stdout, for a test to compare.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from fabricate import fill_spool, make_config, make_model

from agentrl.config import RunConfig
from agentrl.events import NoEvents
from agentrl.training.checkpoint import read_consumed
from agentrl.training.loop import train
from agentrl.training.torch_backend import TorchBackend
from agentrl.weights.version import latest

CALLS = ("fsync", "rename", "replace", "unlink", "rmdir")


def kill_at(call: int) -> None:
    """Arrange that this process dies when it is about to make its disk call number `call`."""
    calls = itertools.count()

    def wrap(name: str) -> None:
        real: Callable[..., object] = getattr(os, name)

        def counted(*args: object, **kwargs: object) -> object:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)

    for name in CALLS:
        wrap(name)


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a forked child; return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def run(config: RunConfig, attempt: int, fatal_call: int | None = None) -> int:
    if fatal_call is not None:
        kill_at(fatal_call)
    return train(config, attempt=attempt, stop=lambda: False, events=NoEvents())


def report(config: RunConfig, case: dict[str, object]) -> None:
    announced = latest(config.run_dir / "weights")
    assert announced is not None
    weights = (announced.folder / "model.safetensors").read_bytes()
    print(
        json.dumps(
            {
                **case,
                "weights": hashlib.sha256(weights).hexdigest(),
                "version": announced.version,
                "done": announced.done,
                "consumed": read_consumed(config.run_dir / "checkpoints"),
                "spool": len(list((config.run_dir / "spool").rglob("*.parquet"))),
                "versions": sorted(os.listdir(config.run_dir / "weights")),
                "checkpoints": sorted(os.listdir(config.run_dir / "checkpoints")),
            }
        ),
        flush=True,
    )


def main(root: Path) -> None:
    torch.set_num_threads(1)
    model = make_model(root / "model", hidden=16, layers=1)
    TorchBackend(model, make_config(root, model))  # all imports done before the first fork
    for call in itertools.count():
        config = make_config(root / f"{call}", model)
        config.training.groups_per_step = 1
        config.training.keep_checkpoints = 1
        fill_spool(config, range(3))
        faulty = in_child(functools.partial(run, config, 1, call))
        if os.WIFEXITED(faulty):
            report(config, {"call": call, "killed": False, "code": os.WEXITSTATUS(faulty)})
            return
        resumed = os.waitstatus_to_exitcode(in_child(functools.partial(run, config, 2)))
        report(config, {"call": call, "killed": True, "code": resumed})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
