from __future__ import annotations

from pathlib import Path

import torch

from agentrl.weights.push import (
    Push,
    buckets_of,
    first_ranks,
    member,
    members,
    read_push,
    tell_members,
    tell_push,
)


def test_buckets_hold_every_tensor_once_and_keep_the_limit() -> None:
    sizes = [10, 30, 25, 200, 1, 1]
    tensors = [(str(at), torch.zeros(size, dtype=torch.int8)) for at, size in enumerate(sizes)]
    found = buckets_of(tensors, 64)
    assert [bucket.names for bucket in found] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert found[0].shapes == [[10], [30]]
    assert found[0].dtypes == ["int8", "int8"]


def test_the_engines_of_all_nodes_are_known_by_their_addresses(odd_path: Path) -> None:
    assert members(odd_path) == []
    tell_members(odd_path, 1, {"engine-0": "http://b"})
    tell_members(odd_path, 0, {"engine-1": "http://d", "engine-0": "http://c"})
    tell_members(odd_path, 1, {"engine-0": "http://e"})
    assert members(odd_path) == [
        member(0, "engine-0", "http://c"),
        member(0, "engine-1", "http://d"),
        member(1, "engine-0", "http://e"),
    ]


def test_each_gpu_of_a_tensor_parallel_engine_has_a_rank() -> None:
    ranks = first_ranks(["a", "b", "c"], 4)
    push = Push(
        attempt=1, version=2, group="g", address="::1", port=1, backend="nccl", ranks=ranks,
        buckets=[], width=4,
    )  # fmt: skip
    assert ranks == {"a": 1, "b": 5, "c": 9}
    assert push.size == 13


def test_a_push_is_read_as_it_was_told(odd_path: Path) -> None:
    assert read_push(odd_path) is None
    push = Push(
        attempt=1,
        version=2,
        group="g",
        address="127.0.0.1",
        port=1,
        backend="gloo",
        ranks={"0/engine-0 http://c": 1},
        buckets=buckets_of([("w", torch.zeros(2, 3))], 100),
    )
    tell_push(odd_path, push)
    assert read_push(odd_path) == push
