"""The trainer's ranks: rank 0 leads, each other rank follows it call by call.

Rank 0 is the trainer role itself. It starts the others on its node as torchrun would (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), tells them what is called as safetensors bytes
over gloo (nothing is pickled), and they take part in it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # not in its __all__
    Store,
    TCPStore,
    distributed_c10d,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.caps_host import free_memory_mb
from agentrl.config import RunConfig, TrainingConfig, to_yaml
from agentrl.errors import AgentRLError, ConfigError, LaunchError
from agentrl.training.backend import Part
from agentrl.training.packing import MicroBatch
from agentrl.weights import group as groups

log = logging.getLogger(__name__)
LOST_S = 5.0
"""Longest that a process may outlive its connections."""
END_S = 300.0
"""Longest that a follower may take to leave once told to."""
NOTICE_S = 30.0
"""Longest that rank 0 may take to notice that a follower is gone. gloo's connections tell at once;
NCCL within a node may not before its timeout, and who waits for groups asks nobody."""
SLACK_S = 600.0
"""Beyond the longest waits, for groups and for a checkpoint: publishing."""


CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where this process stands among the trainer's ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None
    """None: no process group, one process that shards nothing."""
    control: dist.ProcessGroup | None = None
    """gloo, for what rank 0 tells."""

    @property
    def part(self) -> Part:
        """This rank's share of a checkpoint."""
        return Part(self.rank, self.size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, call: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Rank 0: let the followers take part in `call` with these tensors."""
        if self.size == 1:
            return
        named = {name: one.contiguous() for name, one in (tensors or {}).items()}
        data = safetensors.torch.save(named) if named else b""
        dist.broadcast(torch.tensor([call, len(data)]), 0, group=self.control)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self.control)

    def heed(self) -> tuple[int, dict[str, Tensor]]:
        """Follower: wait for the next call; return it with its tensors."""
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, 0, group=self.control)
        call, size = head.tolist()
        if not size:
            return call, {}
        payload = torch.zeros(size, dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self.control)
        return call, safetensors.torch.load(payload.numpy().tobytes())

    @contextlib.contextmanager
    def by_turns(self, needed_mb: int) -> Iterator[None]:
        """Let into the block as many ranks at a time as have `needed_mb` of host memory each."""
        at_once = -self.most(-turns_of(free_memory_mb(), needed_mb, self.size))
        mine, last = self.rank // at_once, (self.size - 1) // at_once
        for _ in range(mine):
            dist.barrier(self.control)
        yield
        for _ in range(last - mine):
            dist.barrier(self.control)

    def summed(self, values: Tensor) -> Tensor:
        """Return `values` (CPU) added up over the ranks."""
        if self.size > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def most(self, value: int) -> int:
        """Return the largest `value` of any rank."""
        found = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return int(found)


ALONE = World()


def turns_of(free_mb: int, needed_mb: int, size: int) -> int:
    """Return how many of `size` ranks may take `needed_mb` each at once: one in any case."""
    return max(1, min(size, free_mb // max(1, needed_mb)))


def join(environment: Mapping[str, str], config: RunConfig) -> World:
    """Take this process's place among the ranks that torchrun's variables tell of."""
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    device = pick_device(config, int(environment["LOCAL_RANK"]))
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        size,
        is_master=False,
        timeout=_patience(config),
    )
    store.set(_here(rank), "")
    return _open(store, rank, size, device, config)


def pick_device(config: RunConfig, local_rank: int = 0) -> torch.device:
    """Return the device that training.device means here. Raises ConfigError when it isn't there."""
    if config.training.device == "cpu":
        return CPU
    found = torch.cuda.device_count()  # of ROCm, too
    needed = 1 if config.training.share_gpus else config.training.ranks  # all are on this node
    if needed > found:
        raise ConfigError(
            f"training.device=gpu, training.ranks={config.training.ranks}: torch "
            f"{torch.__version__} sees {found} GPUs here; ask the cluster for more, set "
            "training.share_gpus=true to try it out on these, or training.device=cpu"
        )
    place = local_rank % found
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


@contextlib.contextmanager
def started(config: RunConfig, *, notice_s: float = NOTICE_S) -> Iterator[World]:
    """Be rank 0: start the other ranks, and end them with the block.

    Raises ConfigError where there is no GPU for each, LaunchError when one of them has ended before
    or does not come; who does not come to see that within notice_s is killed, for nothing that
    waits for a lost rank could end.
    """
    device = pick_device(config)
    size = config.training.ranks
    if size == 1 and device.type == "cpu" and config.training.backend == "torch":
        yield ALONE
        return
    store = groups.host("127.0.0.1", size, _patience(config).total_seconds())
    followers: list[subprocess.Popen[str]] = []
    is_ending = threading.Event()
    watch = threading.Thread(target=_watch, args=(followers, is_ending, notice_s), daemon=True)
    watch.start()
    try:
        for rank in range(1, size):
            followers.append(_start(config, rank, store.port))
        _await_all(store, followers, _patience(config))
        world = _open(store, 0, size, device, config)
        yield world
        is_ending.set()
        world.tell(END)
        dist.destroy_process_group()  # NCCL ends on all ranks or on none
        for rank, follower in enumerate(followers, 1):
            _await_end(rank, follower)
    except RuntimeError as error:  # gloo's and NCCL's, which do not say whose end it was
        if isinstance(error, AgentRLError) or not (lost := _lost(followers, LOST_S)):
            raise
        raise LaunchError(f"{lost}; its last words are in this role's log; {error}") from error
    finally:
        is_ending.set()
        watch.join()
        for follower in followers:
            follower.kill()
            follower.wait()
        if dist.is_initialized():
            _abandon(device)


def _here(rank: int) -> str:
    """Return the store's key by which a follower says that it has come."""
    return f"rank {rank} is here"


def _await_all(
    store: Store, followers: Sequence[subprocess.Popen[str]], patience: datetime.timedelta
) -> None:
    """Wait until the followers have come: who joins groups before waits for who never comes."""
    limit_s = patience.total_seconds()
    deadline = time.monotonic() + limit_s
    words = "its last words are in this role's log"
    for rank in range(1, len(followers) + 1):
        while not store.check([_here(rank)]):
            if lost := _lost(followers, 0.05):
                raise LaunchError(f"{lost} before it took its place; {words}")
            if time.monotonic() > deadline:
                raise LaunchError(f"trainer rank {rank} has not come in {limit_s:g} s; {words}")


def _abandon(device: torch.device) -> None:
    """Leave the groups though other ranks are gone, for whom NCCL would wait."""
    if device.type == "cuda":
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


END = 0
"""The call that ends the followers."""


def _lost(followers: Sequence[subprocess.Popen[str]], limit_s: float = 0.0) -> str:
    """Return which rank has ended, and how; '' when none has within the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        for rank, follower in enumerate(followers, 1):
            if (code := follower.poll()) is not None:
                return f"trainer rank {rank} ended with {code}"
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.05)


def _watch(
    followers: Sequence[subprocess.Popen[str]], is_ending: threading.Event, notice_s: float
) -> None:
    """End this process if it goes on, or hangs, though a follower is gone."""
    lost = ""
    while not lost:
        if is_ending.wait(1.0):
            return
        lost = _lost(followers)
    log.error("%s", lost)
    if not is_ending.wait(notice_s):
        log.critical("%s, and rank 0 waits for it after %g s: it is killed", lost, notice_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _await_end(rank: int, follower: subprocess.Popen[str]) -> None:
    try:
        code = follower.wait(END_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"trainer rank {rank} was told to end and is there {END_S:g} s later; it is killed. "
            "Its last words are in this role's log"
        ) from error
    if code:
        raise LaunchError(f"trainer rank {rank} ended with {code}")


def _start(config: RunConfig, rank: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": config.training.ranks}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.training.follower"],
        env={**os.environ, **{name: str(value) for name, value in (place | master).items()}},
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and is waited for in vain
        process.stdin.write(to_yaml(config))
        process.stdin.close()
    return process


def _open(store: Store, rank: int, size: int, device: torch.device, config: RunConfig) -> World:
    if config.training.share_gpus:  # NCCL refuses two ranks of one host on one GPU
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} rank {rank}"
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=_patience(config)
    )
    control = dist.new_group(backend="gloo", timeout=_patience(config))
    mesh = init_device_mesh(device.type, (size,))
    log.info("rank %d of %d trains on %s", rank, size, device)
    return World(rank=rank, size=size, device=device, mesh=mesh, control=control)


def _patience(config: RunConfig) -> datetime.timedelta:
    training = config.training
    longest = training.wait_timeout_s + longest_write_s(training) + SLACK_S
    return datetime.timedelta(seconds=longest)


def longest_write_s(training: TrainingConfig) -> float:
    """Return how long rank 0 waits for a checkpoint: for the ranks' shares, and for the rest."""
    return 2 * training.checkpoint_timeout_s


def from_text(text: str) -> Tensor:
    """Return text as what can be told."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def to_text(told: Tensor) -> str:
    return told.numpy().tobytes().decode()


_TENSORS = tuple(item.name for item in fields(MicroBatch) if item.name != "real_tokens")


def to_tensors(hands: Sequence[Sequence[MicroBatch]]) -> dict[str, Tensor]:
    """Return the ranks' micro-batches as named tensors, to be told."""
    return {
        f"{rank}/{place}/{name}": tensor
        for rank, hand in enumerate(hands)
        for place, batch in enumerate(hand)
        for name in _TENSORS
        if (tensor := getattr(batch, name)) is not None
    }


def from_tensors(tensors: Mapping[str, Tensor], rank: int) -> list[MicroBatch]:
    """Return the micro-batches of `rank` from what was told."""
    found: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        owner, place, name = key.split("/")
        if int(owner) == rank:
            found.setdefault(int(place), {})[name] = tensor
    return [MicroBatch(**found[place], real_tokens=0) for place in sorted(found)]
