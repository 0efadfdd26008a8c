"""Weights over gloo, from this process as the trainer to real engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl import events
from agentrl.config import EngineConfig
from agentrl.engine.loaded import read_tensors
from agentrl.engine.supervisor import EngineSupervisor
from agentrl.weights import group as groups
from agentrl.weights.push import buckets_of, tell_members
from agentrl.weights.pusher import Pusher, send_buckets
from agentrl.weights.version import Announced, publish_version, tensor_checksum

Tensors = dict[str, torch.Tensor]


pytestmark = pytest.mark.slow  # ranks and servers in processes of their own


def post(server: Any, path: str, **body: Any) -> tuple[int, str]:
    answer = server.post(path, **body)
    return answer.status, answer.json()["message"]


def bucket(tensors: Tensors, **more: Any) -> dict[str, Any]:
    kinds = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
    shapes = [list(one.shape) for one in tensors.values()]
    body = {"names": list(tensors), "dtypes": kinds, "shapes": shapes, "group_name": "g"}
    return {**body, "load_format": "flattened_bucket", **more}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def joined(server: Any, pool: ThreadPoolExecutor) -> Iterator[dist.ProcessGroup]:
    """A group of this process and the server."""
    store = groups.host("127.0.0.1", 2, 60)
    where = {"master_address": "127.0.0.1", "master_port": store.port, "group_name": "g"}
    asked = pool.submit(
        post, server, "/init_weights_update_group", rank_offset=1, world_size=2, **where
    )
    group = groups.join(store, "g", rank=0, size=2, backend="gloo", timeout_s=60)
    assert asked.result()[0] == 200
    yield group
    server.post("/destroy_weights_update_group", group_name="g")
    groups.leave(group)


def send(
    server: Any, pool: ThreadPoolExecutor, group: dist.ProcessGroup, tensors: Tensors
) -> tuple[int, str]:
    body = bucket(tensors, weight_version="7")
    asked = pool.submit(post, server, "/update_weights_from_distributed", **body)
    buckets = buckets_of(tensors.items(), 1 << 40)
    send_buckets(buckets, iter(tensors.items()), group, torch.device("cpu"))
    return asked.result()


def checksum(server: Any) -> str:
    return str(server.post("/weights_checker", action="checksum").json()["ranks"][0]["checksum"])


def test_tensors_that_came_over_a_group_are_the_weights_after_the_end(
    server: Any, pool: ThreadPoolExecutor, joined: dist.ProcessGroup, other_model: Path
) -> None:
    tensors, before = dict(read_tensors(other_model)), checksum(server)
    names = sorted(tensors)
    assert post(server, "/begin_weight_update")[0] == 200
    for half in (names[:5], names[5:]):
        assert send(server, pool, joined, {name: tensors[name] for name in half})[0] == 200
    assert checksum(server) == before
    assert post(server, "/end_weight_update")[0] == 200
    assert checksum(server) == tensor_checksum(tensors.items())
    assert server.get("/model_info").json()["weight_version"] == "7"


def test_a_push_of_another_shape_changes_nothing(
    server: Any, pool: ThreadPoolExecutor, joined: dist.ProcessGroup
) -> None:
    before = checksum(server)
    server.post("/begin_weight_update")
    send(server, pool, joined, {"model.norm.weight": torch.zeros(3)})
    status, message = post(server, "/end_weight_update")
    assert (status, "model.norm.weight of shape (3,)" in message) == (400, True)
    assert checksum(server) == before


def test_what_has_no_beginning_or_no_group_is_refused(server: Any) -> None:
    assert post(server, "/end_weight_update") == (400, "no update was begun")
    body = bucket({"w": torch.zeros(1)})
    assert post(server, "/update_weights_from_distributed", **body)[1] == "no update was begun"
    server.post("/begin_weight_update")
    assert post(server, "/update_weights_from_distributed", **body) == (400, "no group g")


class Trainer:
    """Publishes versions of a run and pushes them to a supervisor's engines."""

    def __init__(self, root: Path, model: Path, supervisor: EngineSupervisor) -> None:
        self.root, self.model, self.supervisor = root, model, supervisor
        self.pusher = Pusher(
            run_dir=root,
            attempt=1,
            address="127.0.0.1",
            device=torch.device("cpu"),
            timeout_s=20,
            bucket_bytes=30_000,
        )

    def announce(self, version: int, tensors: Tensors, transport: str) -> Announced:
        return publish_version(
            self.root / "weights",
            run="test",
            attempt=1,
            version=version,
            step=version,
            tensors=tensors.items(),
            model_folder=self.model,
            consumed=[],
            transport=transport,
        )

    async def push(self, version: int, before_it: Callable[[], None] = lambda: None) -> str:
        """Push other weights as `version`; return why the trainer's end failed."""
        tell_members(self.root / "attempts" / "0001", 0, self.supervisor.members())
        tensors = {name: one + version for name, one in read_tensors(self.model)}
        push = self.pusher.announce(version, tensors)
        assert push is not None
        announced = self.announce(version, tensors, "collective")
        before_it()
        update = asyncio.create_task(self.supervisor.update(announced))
        why = await asyncio.to_thread(self.pusher.send, push, tensors.items())
        await update
        return why


def served(happened: list[events.AnyEvent]) -> list[tuple[str, int]]:
    return [
        (one.engine, one.version)
        for one in happened
        if isinstance(one, events.VersionEvent) and one.phase == "proved"
    ]


def test_a_push_reaches_all_engines_and_a_dead_one_in_the_middle_costs_only_itself(
    tmp_path: Path, model: Path
) -> None:
    async def wait_for(engines: int, supervisor: EngineSupervisor) -> None:
        until = asyncio.get_running_loop().time() + 120
        while len(supervisor.urls()) != engines:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.05)

    async def go(writer: events.EventWriter) -> None:
        config = EngineConfig(context_length=256, max_running=8, count=2)
        supervisor = EngineSupervisor(config, model=model, logs=tmp_path / "logs", events=writer)
        trainer = Trainer(tmp_path, model, supervisor)
        try:
            await supervisor.start(trainer.announce(0, dict(read_tensors(model)), "disk"))
            assert await trainer.push(1) == ""
            first = trainer.pusher._push
            assert await trainer.push(2) == ""
            doomed = supervisor._keepers[1].process
            assert doomed is not None
            assert await trainer.push(3, lambda: os.killpg(doomed.pid, signal.SIGKILL)) != ""
            await wait_for(2, supervisor)
            assert await trainer.push(4) == ""
            last = trainer.pusher._push
            assert first is not None
            assert last is not None
            assert first.group != last.group
        finally:
            await supervisor.close()
            trainer.pusher.close()

    writer = events.EventWriter(tmp_path / "events", "inference")
    asyncio.run(go(writer))
    writer.close()
    happened = events.read_folder(tmp_path / "events")
    assert {("engine-0", version) for version in range(5)} <= set(served(happened))
    assert ("engine-1", 4) in served(happened)
    failed = [one for one in happened if getattr(one, "state", "").startswith("push failed")]
    assert {one.engine for one in failed if isinstance(one, events.EngineState)} == {"engine-0"}
    disk = (tmp_path / "logs" / "engine-0.log").read_text()
    assert "weights over a group" in disk
