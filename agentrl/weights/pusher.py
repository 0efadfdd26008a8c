"""The trainer's end of a push: gather who takes part, meet them, send the buckets.

What fails is said and left to the disk: the version is there before it is announced, and an engine
that did not get it whole loads it from there.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from agentrl.weights import group as groups
from agentrl.weights.push import Bucket, Push, buckets_of, first_ranks, members, tell_push

log = logging.getLogger(__name__)


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

        One bucket is in memory at a time. `tensors` is not begun unless all have met; once begun
        it is read to its end, for it may be a gathering that the trainer's other ranks are in.
        """
        try:
            if self._group is None:
                self._group = self._join(push)
        except RuntimeError as error:  # gloo's and NCCL's, of one that never came
            return self._gave_up(push, error)
        coming = iter(tensors)
        try:
            for bucket in push.buckets:
                self._send(_next(coming, bucket), self._group)
        except RuntimeError as error:  # of one that left
            return self._gave_up(push, error)
        finally:
            for _ in coming:
                pass
        return ""

    def _gave_up(self, push: Push, error: RuntimeError) -> str:
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

    def _send(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        """Send a bucket; its tensors stay in memory until all of them are gone."""
        here = [tensor.to(self.device).contiguous() for tensor in tensors]
        works = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in here]
        for work in works:
            assert work is not None  # it is with async_op
            work.wait()


def _next(coming: Iterator[tuple[str, Tensor]], bucket: Bucket) -> list[Tensor]:
    taken = dict(itertools.islice(coming, len(bucket.names)))
    if list(taken) != bucket.names:
        raise ValueError(f"a bucket of {bucket.names} was announced, and {list(taken)} came")
    return list(taken.values())
