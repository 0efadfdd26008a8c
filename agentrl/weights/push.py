"""What a push of weights is, as trainer and nodes tell each other by files.

A node lists its running engines in `attempts/…/members/NODE.json`. Before the trainer announces a
version with transport `collective` it writes `weights/PUSH.json`: who takes part under which rank,
where they meet, and in which buckets the tensors come. An engine that is not in it, or whose push
fails, loads the same version from disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.handoff.publish import publish_json

if TYPE_CHECKING:  # an inference node's processes read pushes only
    from torch import Tensor

PUSH = "PUSH.json"
MEMBERS = "members"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype that are sent as one, end to end, in one request."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    attempt: int
    version: int
    group: str
    """Name of the group; another one whenever those who take part are others."""
    address: str
    port: int
    backend: str
    """`gloo` or `nccl`."""
    ranks: dict[str, int]
    """First rank of each engine, by `member`; the trainer's is 0."""
    buckets: list[Bucket]
    width: int = 1
    """Ranks of one engine: each GPU of a tensor-parallel one takes part."""

    @property
    def size(self) -> int:
        return len(self.ranks) * self.width + 1


def member(node: int, engine: str, url: str) -> str:
    """Name one life of one engine: after a restart it has another address."""
    return f"{node}/{engine} {url}"


def tell_members(attempt_dir: Path, node: int, engines: Mapping[str, str]) -> None:
    """List a node's running engines: addresses by name."""
    publish_json(attempt_dir / MEMBERS / f"{node}.json", dict(engines))


def members(attempt_dir: Path) -> list[str]:
    """Return the engines of all nodes, in a fixed order."""
    folder = attempt_dir / MEMBERS
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [
        member(int(name.removesuffix(".json")), engine, url)
        for name in names
        if name.endswith(".json") and name[0] != "."
        for engine, url in sorted(json.loads((folder / name).read_bytes()).items())
    ]


def buckets_of(tensors: Iterable[tuple[str, Tensor]], limit: int) -> list[Bucket]:
    """Cut tensors into buckets of at most `limit` bytes; a larger tensor has one of its own.

    A tensor of another dtype begins another bucket: within one, each lies aligned.
    """
    buckets: list[Bucket] = []
    filled, dtype = limit, None
    for name, tensor in tensors:
        if filled + tensor.nbytes > limit or tensor.dtype != dtype:
            buckets.append(Bucket(names=[], dtypes=[], shapes=[]))
            filled, dtype = 0, tensor.dtype
        buckets[-1].names.append(name)
        buckets[-1].dtypes.append(str(tensor.dtype).removeprefix("torch."))
        buckets[-1].shapes.append(list(tensor.shape))
        filled += tensor.nbytes
    return buckets


def first_ranks(members: Iterable[str], width: int) -> dict[str, int]:
    """Number the engines behind the trainer, `width` ranks each."""
    return {one: 1 + place * width for place, one in enumerate(members)}


def tell_push(weights: Path, push: Push) -> None:
    publish_json(weights / PUSH, asdict(push))


def read_push(weights: Path) -> Push | None:
    """Return the newest push, None before the first."""
    if not weights.is_dir() or PUSH not in os.listdir(weights):
        return None
    record = json.loads((weights / PUSH).read_bytes())
    return Push(**{**record, "buckets": [Bucket(**one) for one in record["buckets"]]})
