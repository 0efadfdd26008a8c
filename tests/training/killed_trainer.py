"""Fault injector: runs the real training loop and has the kernel SIGKILL it before a disk call.

`killed_trainer.py ROOT` runs once without faults and notes from where in our code each os.fsync,
os.rename, os.replace, os.unlink and os.rmdir is called. Then, for one call from each place (by
turns the first and the last; both where it renames), a forked child runs and kills itself on
reaching it, and another child resumes without faults; places that only a resume comes through get
a kill of their own there, the second of that run. One JSON line a case goes to stdout, for a test
to compare; the first is the unharmed run.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fabricate import fill_spool, make_config, make_model

import agentrl
from agentrl.config import RunConfig
from agentrl.events import NoEvents
from agentrl.training.checkpoint import read_consumed
from agentrl.training.loop import train
from agentrl.training.torch_backend import TorchBackend
from agentrl.weights.version import latest

CALLS = ("fsync", "rename", "replace", "unlink", "rmdir")
STEPS = 2
OURS = str(Path(agentrl.__file__).parent)
Point = tuple[str, int]
"""A place in our code, as its stack tells it, and which call from there."""


def place_of(name: str) -> str:
    """Return the call `name` with the line of each function of ours that led to it."""
    frame, lines = sys._getframe(2), [name]
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(OURS):
            lines.append(f"{file[len(OURS) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def watch_calls(fatal: Point | None) -> Counter[str]:
    """Count this process's disk calls by place from now on; it dies on reaching `fatal`."""
    seen: Counter[str] = Counter()

    def wrap(name: str) -> None:
        real: Callable[..., object] = getattr(os, name)

        def counted(*args: object, **kwargs: object) -> object:
            place = place_of(name)
            seen[place] += 1
            if (place, seen[place]) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)

    for name in CALLS:
        wrap(name)
    return seen


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a forked child; return its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(config: RunConfig, attempt: int, fatal: Point | None, calls: Path) -> int:
    seen = watch_calls(fatal)
    code = train(config, attempt=attempt, stop=lambda: False, events=NoEvents())
    calls.write_text(json.dumps(seen))
    return code


def play(root: Path, model: Path, fatal: tuple[Point, ...]) -> tuple[dict[str, Any], Counter[str]]:
    """Run, killed at each of `fatal` in turn, and then to the end; return what is left of it."""
    config = make_config(root, model)
    config.training.steps = STEPS
    config.training.groups_per_step = config.training.checkpoint_every = 1
    config.training.keep_checkpoints = config.training.keep_versions = 1
    fill_spool(config, range(STEPS))
    calls = root / "calls.json"
    codes = [
        in_child(functools.partial(run, config, attempt, point, calls))
        for attempt, point in enumerate((*fatal, None), start=1)
    ]
    announced = latest(config.run_dir / "weights")
    assert announced is not None
    weights = (announced.folder / "model.safetensors").read_bytes()
    case = {
        "killed_at": fatal,
        "codes": codes,
        "weights": hashlib.sha256(weights).hexdigest(),
        "version": announced.version,
        "done": announced.done,
        "consumed": read_consumed(config.run_dir / "checkpoints"),
        "spool": len(list((config.run_dir / "spool").rglob("*.parquet"))),
        "versions": sorted(os.listdir(config.run_dir / "weights")),
        "checkpoints": sorted(os.listdir(config.run_dir / "checkpoints")),
    }
    return case, Counter(json.loads(calls.read_bytes()))


def cases(root: Path, model: Path) -> Iterator[dict[str, Any]]:
    unharmed, known = play(root / "unharmed", model, ())
    yield unharmed
    once = dict.fromkeys(
        (place, call)
        for index, place in enumerate(known)
        for call in (1, known[place])
        if place.startswith(("rename", "replace")) or call == (1, known[place])[index % 2]
    )
    later: dict[Point, tuple[Point, ...]] = {}
    for number, point in enumerate(once):
        case, seen = play(root / f"{number}", model, (point,))
        yield case
        for place in seen.keys() - known.keys():
            later.setdefault((place, 1), (point, (place, 1)))
    for number, points in enumerate(later.values()):
        yield play(root / f"again-{number}", model, points)[0]


def main(root: Path) -> None:
    torch.set_num_threads(1)
    model = make_model(root / "model", hidden=16, layers=1)
    TorchBackend(model, make_config(root, model))  # all imports done before the first fork
    gc.freeze()  # a child that collects garbage would copy every page of them
    for case in cases(root, model):
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
