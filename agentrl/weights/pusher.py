"""The trainer's end of a push: gather who takes part, meet them, send the buckets.

What fails is said and left to the disk: the version is there before it is announced, and an engine
that did not get it whole loads it from there.
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from agentrl.weights import group as groups
from agentrl.weights.push import Bucket, Push, buckets_of, first_ranks, members, tell_push

log = logging.getLogger(__name__)


class LostReceiver(Exception):
    """An engine left in the middle of a push."""


@dataclass(kw_only=True, slots=True)
class Pusher:
    """Keeps its group from one version to the next while the same engines are there."""

    run_dir: Path
    attempt: int
    address: str
    """Of the interface where engines reach the trainer."""
    device: torch.device
    timeout_s: float
    """Longest that meeting, and sending one bucket, may take."""
    bucket_bytes: int
    gpus_per_engine: int = 1
    _push: Push | None = None
    _store: TCPStore | None = None
    _group: dist.ProcessGroup | None = None

    def announce(self, version: int, tensors: dict[str, Tensor]) -> Push | None:
        """Write down what will be sent; None when no engine is there to take it."""
        present = members(self.run_dir / "attempts" / f"{self.attempt:04d}")
        last = self._push
        if last is None or self._group is None or list(last.ranks) != present:
            self.close()
            last = None
        if not present:
            return None
        if last is None:
            self._store = groups.host(
                self.address, len(present) * self.gpus_per_engine + 1, self.timeout_s
            )
        assert self._store is not None
        self._push = Push(
            attempt=self.attempt,
            version=version,
            group=f"weights-{uuid.uuid4().hex}" if last is None else last.group,
            address=self.address,
            port=self._store.port,
            backend="nccl" if self.device.type == "cuda" else "gloo",
            ranks=first_ranks(present, self.gpus_per_engine),
            width=self.gpus_per_engine,
            buckets=buckets_of(tensors.items(), self.bucket_bytes),
        )
        tell_push(self.run_dir / "weights", self._push)
        return self._push

    def send(self, push: Push, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Send what was announced, in its order; return why it failed, empty if it did not.

        `tensors` is not begun unless all have met; once begun it is read to its end, for it may be
        a gathering that the trainer's other ranks are in.
        """
        try:
            if self._group is None:
                self._group = self._join(push)
        except RuntimeError as error:  # gloo's and NCCL's, of one that never came
            return self._gave_up(push, error)
        coming = iter(tensors)
        try:
            send_buckets(push.buckets, coming, self._group, self.device)
        except LostReceiver as error:
            return self._gave_up(push, error)
        finally:
            for _ in coming:
                pass
        return ""

    def _gave_up(self, push: Push, error: Exception) -> str:
        log.warning("push of version %d: %s; engines load it from disk", push.version, error)
        self.close()
        return str(error)

    def close(self) -> None:
        """Tear the group down."""
        if self._group is not None:
            groups.leave(self._group)
        self._group = self._store = None

    def _join(self, push: Push) -> dist.ProcessGroup:
        assert self._store is not None
        return groups.join(
            self._store,
            push.group,
            rank=0,
            size=push.size,
            backend=push.backend,
            timeout_s=self.timeout_s,
        )


def send_buckets(
    buckets: Iterable[Bucket],
    coming: Iterator[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Broadcast tensors from rank 0 as the buckets list them, each bucket as one run of bytes.

    While one is on its way the next is gathered: two are in memory at a time. Raises LostReceiver;
    what `coming` raises is its own.
    """
    before: dist.Work | None = None
    for bucket in buckets:
        flat = torch.cat([_bytes(tensor, device) for tensor in _next(coming, bucket)])
        before = _sent(before, flat, group)
    _sent(before, None, group)


def _sent(
    before: dist.Work | None, flat: Tensor | None, group: dist.ProcessGroup | None
) -> dist.Work | None:
    """Wait for the bucket before, and send the next if there is one. Raises LostReceiver."""
    try:
        if before is not None:
            before.wait()
        return None if flat is None else dist.broadcast(flat, 0, group=group, async_op=True)
    except RuntimeError as error:  # gloo's and NCCL's
        raise LostReceiver(str(error)) from error


def room_for(
    dtypes: Sequence[str], shapes: Sequence[Sequence[int]], device: str = "cpu"
) -> tuple[Tensor, list[Tensor]]:
    """Return a receiver's room for a bucket: its bytes, and the tensors that they are."""
    kinds = [getattr(torch, name) for name in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    parts = zip(torch.split(flat, sizes), kinds, shapes, strict=True)
    return flat, [part.view(kind).view(tuple(shape)) for part, kind, shape in parts]


def _next(coming: Iterator[tuple[str, Tensor]], bucket: Bucket) -> list[Tensor]:
    taken = dict(itertools.islice(coming, len(bucket.names)))
    if list(taken) != bucket.names:
        raise ValueError(f"a bucket of {bucket.names} was announced, and {list(taken)} came")
    return list(taken.values())


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).reshape(-1).view(torch.uint8)
