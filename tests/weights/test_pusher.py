from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.weights.push import Push, tell_members
from agentrl.weights.pusher import Pusher

RECEIVER = Path(__file__).with_name("push_receiver.py")
GPUS = torch.cuda.device_count()
BOTH = [
    pytest.param(("cpu", "cpu"), id="gloo"),
    pytest.param(
        ("cuda:0", f"cuda:{GPUS - 1}"),
        id="nccl",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no GPU here")],
    ),
]


SMALL, LARGE = 1000, 2**24
"""NCCL takes a small broadcast for sent as soon as it lies in its own buffer."""


class Gathering:
    """A model that is gathered anew at each push; knows how often, and whether to the end."""

    def __init__(self, device: str) -> None:
        self.device, self.size = torch.device(device), SMALL if device == "cpu" else LARGE
        self.tensors = {
            f"w{at}": torch.full((self.size,), float(at), device=device) for at in range(6)
        }
        self.begun = self.ended = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.begun += 1
        yield from self.tensors.items()
        self.ended += 1


def open_pusher(run_dir: Path, model: Gathering, *, timeout_s: float = 30) -> Pusher:
    """Return one that sends each tensor of the model as a bucket."""
    return Pusher(
        run_dir=run_dir, attempt=1, address="127.0.0.1", device=model.device, timeout_s=timeout_s,
        bucket_bytes=4 * model.size,
    )  # fmt: skip


def announce(pusher: Pusher, life: str, tensors: dict[str, Tensor]) -> Push:
    """Announce tensors to one engine, which is known by its address."""
    tell_members(pusher.run_dir / "attempts" / "0001", 0, {"engine-0": life})
    told = pusher.announce(1, tensors)
    assert told is not None
    return told


def receiver(pusher: Pusher, buckets: int, device: str = "cpu") -> subprocess.Popen[str]:
    """Start that engine; it takes so many buckets."""
    command = [sys.executable, RECEIVER, pusher.run_dir / "weights", device, buckets]
    host = {"NCCL_HOSTID": "another"} if GPUS == 1 else {}  # or NCCL refuses both on one GPU
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env=os.environ | host
    )


@pytest.fixture
def push(tmp_path, request):
    """What pushes a model of six buckets to a receiver of so many: (why, its answer); the model."""
    ours, theirs = request.param
    model = Gathering(ours)
    pusher = open_pusher(tmp_path, model)

    def work(life: str, buckets: int) -> tuple[str, float]:
        told = announce(pusher, life, model.tensors)
        assert len(told.buckets) == 6
        with receiver(pusher, buckets, theirs) as engine:
            why = pusher.send(told, model)
            printed, _ = engine.communicate(timeout=60)
        return why, float(printed or "nan")

    yield work, model
    pusher.close()


@pytest.mark.slow
@pytest.mark.parametrize("push", BOTH, indirect=True)
def test_a_receiver_that_dies_in_the_middle_fails_its_push_and_nothing_else(push):
    work, model = push
    why, got = work("http://first", 2)
    assert why
    assert got == model.size
    assert (model.begun, model.ended) == (1, 1)  # other ranks may gather with us
    assert work("http://second", 6) == ("", 15 * model.size)
    assert model.ended == 2


def test_nothing_is_gathered_for_engines_that_never_come(tmp_path):
    model = Gathering("cpu")
    pusher = open_pusher(tmp_path, model, timeout_s=0.5)
    told = announce(pusher, "http://gone", model.tensors)
    assert pusher.send(told, model)
    assert model.begun == 0
    pusher.close()


def test_a_gathering_that_breaks_is_not_taken_for_a_lost_engine(tmp_path):
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(model.tensors.items()))
        raise RuntimeError("out of memory")

    model = Gathering("cpu")
    pusher = open_pusher(tmp_path, model)
    told = announce(pusher, "http://there", model.tensors)
    with receiver(pusher, 6) as engine:
        with pytest.raises(RuntimeError, match="out of memory"):
            pusher.send(told, broken())
        engine.kill()
    pusher.close()


def test_other_tensors_than_were_announced_are_not_sent_as_those(tmp_path):
    model = Gathering("cpu")
    pusher = open_pusher(tmp_path, model)
    told = announce(pusher, "http://there", dict(reversed(model.tensors.items())))
    with receiver(pusher, 6) as engine:
        with pytest.raises(ValueError, match=r"\['w5'\] was announced, and \['w0'\] came"):
            pusher.send(told, model)
        engine.kill()
    pusher.close()
